"""etcd, NATS and KV masters die, freeze and come back."""

from __future__ import annotations

import asyncio
import signal

import grpc

from kvist.controller.v1 import controller_pb2 as pb
from kvist.controller.v1.controller_pb2_grpc import ControllerServiceStub
from kvist.events.v1.events_pb2 import SOURCE_STATE_EXACT
from kvist.grpc import open_channel
from kvist.kvmaster.v1.kvmaster_pb2 import INSTANCE_ROLE_LEADER, INSTANCE_ROLE_STANDBY, StatsRequest
from kvist.kvmaster.v1.kvmaster_pb2_grpc import KvMasterServiceStub
from kvist.router.v1.router_pb2 import ListSourcesRequest, SourceStatus
from kvist.router.v1.router_pb2_grpc import RouterServiceStub
from support.control_mesh import CONTROLLER_KEY, KVMASTER_KEY, ControlMesh
from support.failover import LIMIT_SECONDS, Scene
from support.scrape import scrape

CALL_SECONDS = 2.0


async def kvmaster_leader_is_killed(scene: Scene) -> None:
    await _kvmaster_leader_fails(scene, signal.SIGKILL)


async def kvmaster_leader_is_frozen(scene: Scene) -> None:
    await _kvmaster_leader_fails(scene, signal.SIGSTOP)


async def _kvmaster_leader_fails(scene: Scene, fault: signal.Signals) -> None:
    mesh = scene.mesh
    await scene.until_true("a KV master leads", lambda: mesh.holder(KVMASTER_KEY))
    old = mesh.holder(KVMASTER_KEY)
    standby = next(name for name in ("kvmaster-0", "kvmaster-1") if name != old)
    address = mesh.services[standby].address
    async with asyncio.timeout(LIMIT_SECONDS):
        while (await mesh.role_of(address))[0] != INSTANCE_ROLE_STANDBY:
            await asyncio.sleep(0.1)
    await until_exact(mesh, scene.workers)
    _, old_fence = await mesh.role_of(mesh.services[old].address)
    word = "killed" if fault is signal.SIGKILL else "frozen"
    async with scene.step(f"KV master leader {word}: the standby leads", limit_seconds=3) as step:
        step.begin()
        mesh.send(old, fault)
        roles: list[int] = []
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                # The standby answers all the while, and says which part it plays.
                roles.append((await mesh.lookup(address)).answered_by)
                if roles[-1] == INSTANCE_ROLE_LEADER:
                    break
                await asyncio.sleep(0.02)
        step.end()
    assert roles[0] == INSTANCE_ROLE_STANDBY
    assert (await mesh.role_of(address))[1] > old_fence > 0
    await _router_attaches(scene, word, old=old, new=standby)
    if fault is signal.SIGKILL:
        process = mesh.services[old].process
        assert process is not None
        await process.wait()
        await mesh.start_again(old)
    else:
        mesh.send(old, signal.SIGCONT)
    async with asyncio.timeout(LIMIT_SECONDS):
        while (await mesh.role_of(mesh.services[old].address)) != (INSTANCE_ROLE_STANDBY, 0):
            await asyncio.sleep(0.1)


async def _router_attaches(scene: Scene, word: str, *, old: str, new: str) -> None:
    """A router that asks the KV master that is gone first has its whole index from the other one."""
    mesh = scene.mesh
    name = f"router-after-{word}"
    asked = ",".join(mesh.services[kvmaster].address for kvmaster in (old, new))
    async with scene.step(f"KV master {word}: a new router has its index from the other", limit_seconds=5) as step:
        router = await mesh.start_service(name, "router", mesh.router_settings(name) | {"kvmasters": asked})
        step.begin()
        async with asyncio.timeout(LIMIT_SECONDS):
            while not _are_exact(await _sources_of_router(router.address), scene.workers):
                await asyncio.sleep(0.05)
        step.end()
    try:
        # Numbers are sampled now and then.
        async with asyncio.timeout(LIMIT_SECONDS):
            while (await scrape(router.admin_address))["kvist_index_bootstrapped_sources_total"] != scene.workers:
                await asyncio.sleep(0.1)
    finally:
        await mesh.kill(name)
        del mesh.services[name]


async def etcd_leader_is_killed(scene: Scene) -> None:
    await _etcd_leader_fails(scene, "killed")


async def etcd_leader_is_frozen(scene: Scene) -> None:
    await _etcd_leader_fails(scene, "frozen")


async def _etcd_leader_fails(scene: Scene, word: str) -> None:
    mesh = scene.mesh
    member = mesh.etcd.members[await mesh.etcd.leader()]
    # A write that is under way when the leader goes is lost, and its client waits for its time limit of 5 s.
    async with scene.step(f"etcd leader {word}: a change is taken", limit_seconds=8) as step:
        step.begin()
        if word == "killed":
            member.kill()
        else:
            member.freeze()
        await scene.change()
        step.end()
    if word == "killed":
        member.start()
    else:
        member.thaw()
    await member.until_listening()
    # Whether leaders of ours were changed by it depends on how busy the machine is; that there are any does not.
    await scene.until_true("both have a leader", lambda: mesh.holder(CONTROLLER_KEY) and mesh.holder(KVMASTER_KEY))


async def etcd_is_away(scene: Scene) -> None:
    mesh, load = scene.mesh, scene.load
    before = len(load.outcomes)
    members = mesh.etcd.members.values()
    version = mesh.state.version
    workers = _incarnations(mesh)
    for member in members:
        member.kill()
    await asyncio.sleep(scene.form.outage_seconds)
    assert len(load.outcomes) > before
    assert [] == load.bad(since=before)
    assert version == mesh.state.version, "the state changed without a store"
    # A new subscriber is served all the same.
    async with open_channel(mesh.controllers[0], retries=False) as channel:
        call = ControllerServiceStub(channel).WatchCluster(pb.WatchClusterRequest(subscriber="late"))
        response = await asyncio.wait_for(call.read(), LIMIT_SECONDS)
        assert isinstance(response, pb.WatchClusterResponse)
        assert len(response.state.workers) == scene.workers
        call.cancel()
    limit = scene.form.controller_lease_seconds + 7
    async with scene.step("all of etcd back: a change is taken again", limit_seconds=limit) as step:
        for member in members:
            member.start()
        step.begin()
        await scene.change()
        step.end()
    # Whatever was not heard of meanwhile is not taken for gone.
    assert workers == _incarnations(mesh), "membership was not kept"


async def nats_is_away(scene: Scene) -> None:
    mesh, load = scene.mesh, scene.load
    usual, scene.workers = scene.workers, scene.form.catch_up_workers
    await scene.change()
    await mesh.until_workers(scene.workers)
    await until_exact(mesh, scene.workers)
    before = len(load.outcomes)
    await mesh.nats.stop()
    await asyncio.sleep(scene.form.outage_seconds)
    assert len(load.outcomes) > before
    assert [] == load.bad(since=before)
    await mesh.nats.start()
    await _until_caught_up(scene, f"NATS back: {scene.workers} workers EXACT in all indexes")
    scene.workers = usual
    await scene.change()
    await mesh.until_workers(usual)


async def nats_cannot_be_reached(scene: Scene) -> None:
    """Connections to NATS stay open, and nothing comes through."""
    mesh, load = scene.mesh, scene.load
    before = len(load.outcomes)
    mesh.nats_door.is_cut = True
    await load.until_finished(25, limit_seconds=LIMIT_SECONDS)
    assert [] == load.bad(since=before)
    await mesh.nats_door.heal()
    await _until_caught_up(scene, f"half-open connections to NATS end: {scene.workers} workers EXACT in all indexes")


async def _until_caught_up(scene: Scene, name: str) -> None:
    async with scene.step(name, limit_seconds=5) as step:
        step.begin()
        await until_exact(scene.mesh, scene.workers)
        step.end()


async def until_exact(mesh: ControlMesh, workers: int) -> None:
    """All indexes know all of what so many workers hold."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            known = await asyncio.gather(
                *(_sources_of_router(mesh.services[name].address) for name in ("router-0", "router-1")),
                *(_sources_of_kvmaster(address) for address in mesh.kvmasters),
            )
            if all(_are_exact(sources, workers) for sources in known):
                return
            await asyncio.sleep(0.05)


def _are_exact(sources: list[SourceStatus], workers: int) -> bool:
    return sum(source.state == SOURCE_STATE_EXACT for source in sources) == len(sources) == workers


async def _sources_of_router(address: str) -> list[SourceStatus]:
    try:
        async with open_channel(address, retries=False) as channel:
            answer = await RouterServiceStub(channel).ListSources(ListSourcesRequest(), timeout=CALL_SECONDS)
    except grpc.aio.AioRpcError:
        return []
    return list(answer.sources)


async def _sources_of_kvmaster(address: str) -> list[SourceStatus]:
    try:
        async with open_channel(address, retries=False) as channel:
            answer = await KvMasterServiceStub(channel).Stats(StatsRequest(), timeout=CALL_SECONDS)
    except grpc.aio.AioRpcError:
        return []
    return list(answer.sources)


def _incarnations(mesh: ControlMesh) -> dict[str, int]:
    return {worker.target.worker_uid: worker.incarnation for worker in mesh.state.workers}
