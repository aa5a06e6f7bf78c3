"""Controllers die, freeze, are cut off and have wrong clocks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
import urllib.error
import urllib.request

import grpc

from kvist.agent.v1.agent_pb2 import StopWorkerRequest
from kvist.agent.v1.agent_pb2_grpc import AgentServiceStub
from kvist.controller.v1 import controller_pb2 as pb
from kvist.controller.v1.controller_pb2_grpc import ControllerServiceStub
from kvist.etcd import EtcdOptions, EtcdStore
from kvist.grpc import open_channel
from kvist.store import Compare, Put
from support.control_mesh import CONTROLLER_KEY, ROOT_KEY, ControlMesh
from support.failover import LIMIT_SECONDS, MODEL, Scene

CLOCK_JUMP_SECONDS = 3_600
# Further than any clock of a test machine goes wrong by itself.
LEAST_JUMP_SECONDS = CLOCK_JUMP_SECONDS / 2


async def leader_is_killed(scene: Scene) -> None:
    mesh = scene.mesh
    old = mesh.holder(CONTROLLER_KEY)
    limit = scene.form.controller_lease_seconds + 2
    async with scene.step("controller leader killed: another one takes a change", limit_seconds=limit) as step:
        await mesh.kill(old)
        await mesh.until_led(CONTROLLER_KEY, by_other_than=old, limit_seconds=LIMIT_SECONDS)
        # It leads when it decides: a change of the resource comes through.
        await scene.change()
        step.end()
    await until_agents_are_heard(mesh)
    await mesh.start_again(old)


async def leader_is_paused(scene: Scene) -> None:
    """It wakes up after its lease, with heartbeats of agents in its sockets, and finds out before it acts."""
    mesh = scene.mesh
    old = mesh.holder(CONTROLLER_KEY)
    claimed_at = mesh.claims_of(CONTROLLER_KEY)[-1][0]
    limit = scene.form.controller_lease_seconds + 2
    async with scene.step("controller leader frozen: another one leads", limit_seconds=limit) as step:
        mesh.send(old, signal.SIGSTOP)
        try:
            await mesh.until_led(CONTROLLER_KEY, by_other_than=old, limit_seconds=LIMIT_SECONDS)
            new = mesh.holder(CONTROLLER_KEY)
            step.end()
            await until_agents_are_heard(mesh)
            before = mesh.state.version.revision
        finally:
            mesh.send(old, signal.SIGCONT)
    log = mesh.folder / f"{old}.log"
    await scene.until_true("the old leader has noticed", lambda: "leadership_lost" in log.read_text())
    await until_it_stands_by(mesh, old)
    assert new == mesh.holder(CONTROLLER_KEY), "the old leader took the lead back"
    assert before <= mesh.state.version.revision
    await check_that_late_writes_fail(mesh, claimed_at)


async def until_it_stands_by(mesh: ControlMesh, name: str) -> None:
    """The controller answers as a standby: it passes on what only the leader knows."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if len(await _nodes(mesh, name)) == len(mesh.agents):
                    return
            await asyncio.sleep(0.1)


async def check_that_late_writes_fail(mesh: ControlMesh, claimed_at: int) -> None:
    """What the old leader would have said late is refused by the store, and by an agent."""
    key = f"{ROOT_KEY}test/late"
    async with EtcdStore(EtcdOptions(mesh.etcd.endpoints)) as store:
        late = await store.commit([Put(key, b"late")], when=[Compare(CONTROLLER_KEY, create_revision=claimed_at)])
        assert not late.succeeded
        assert await store.get(key) is None
        fence = store.epoch + claimed_at
    uid = next(iter(await mesh.workers()))
    for name in mesh.agents:
        async with open_channel(mesh.services[name].address, retries=False) as channel:
            call = AgentServiceStub(channel).StopWorker(StopWorkerRequest(worker_uid=uid, fence=fence), timeout=5)
            assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "has taken over" in await call.details()


async def leader_cannot_be_reached(scene: Scene) -> None:
    """Connections of agents and routers to the leader stay open, and nothing comes through."""
    mesh = scene.mesh
    door = mesh.controller_doors[mesh.holder(CONTROLLER_KEY)]
    async with scene.step("half-open connections to the controller leader: a change arrives", limit_seconds=5) as step:
        # Of the wall clock, as heartbeats are.
        cut_at = time.time()
        door.is_cut = True
        step.begin()
        await scene.change()
        await asyncio.gather(
            until_agents_are_heard(mesh, since=cut_at),
            *(until_served(edge, mesh.alias) for edge in mesh.edges()),
        )
        step.end()
    await door.heal()


async def clock_jumps(scene: Scene) -> None:
    """An hour forward, then an hour back behind the right time: leases are of another clock."""
    mesh = scene.mesh
    leader = mesh.holder(CONTROLLER_KEY)
    claims = mesh.claims_of(CONTROLLER_KEY)
    for seconds, word in ((CLOCK_JUMP_SECONDS, "forward"), (-CLOCK_JUMP_SECONDS, "back")):
        async with scene.step(f"the leader's clock jumps {word} by 1 h: a change arrives", limit_seconds=5) as step:
            mesh.clocks[leader].turn(seconds=seconds)
            step.begin()
            await scene.change()
            await asyncio.gather(*(until_served(edge, mesh.alias) for edge in mesh.edges()))
            step.end()
        await _until_clock_is_off(mesh, leader, seconds)
        # What a lease measured by this clock would not have survived.
        await asyncio.sleep(scene.form.controller_lease_seconds + 1)
    mesh.clocks[leader].turn(seconds=0)
    assert claims == mesh.claims_of(CONTROLLER_KEY), "the lead changed hands"
    assert all(node.present for node in await _nodes(mesh, leader))


async def _until_clock_is_off(mesh: ControlMesh, name: str, seconds: int) -> None:
    """The controller has seen its clock jump: heartbeats have come an hour too late, or too early."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            heard = [node.heard_at.ToNanoseconds() / 1e9 - time.time() for node in await _nodes(mesh, name)]
            if all(off * seconds > 0 and abs(off) > LEAST_JUMP_SECONDS for off in heard):
                return
            await asyncio.sleep(0.2)


async def history_is_cut_while_a_standby_is_away(scene: Scene) -> None:
    """What a controller missed is compacted away: it lists again, and is where the leader is."""
    mesh = scene.mesh
    leader = mesh.holder(CONTROLLER_KEY)
    standby = next(name for name in mesh.clocks if name != leader)
    links = mesh.etcd_links[standby].values()
    await asyncio.gather(*(link.black_hole() for link in links))
    for _ in range(3):
        await scene.change()
    # All of it, but for what the test itself has not seen.
    changed_at = mesh.state.version.revision
    await scene.until_true("the test has seen the changes", lambda: mesh.seen_revision >= changed_at)
    await mesh.etcd.compact(mesh.seen_revision)
    behind = await _alias(mesh, standby)
    assert behind != mesh.alias
    limit = 10.0
    async with scene.step("etcd compacted while a controller was away: it is current", limit_seconds=limit) as step:
        await asyncio.gather(*(link.heal() for link in links))
        step.begin()
        async with asyncio.timeout(LIMIT_SECONDS):
            while await _alias(mesh, standby) != mesh.alias:
                await asyncio.sleep(0.05)
        step.end()
    assert "mirror_lists_again" in (mesh.folder / f"{standby}.log").read_text()


async def routers_start_without_controllers(scene: Scene) -> None:
    """Both controllers are gone, and then a router is killed and started."""
    mesh = scene.mesh
    for name in mesh.clocks:
        await mesh.kill(name)
    await mesh.kill("router-0")
    async with scene.step("router started without any controller: it serves", limit_seconds=8) as step:
        await mesh.start_again("router-0")
        await until_served(mesh.edges()[0])
        step.end()
    for name in mesh.clocks:
        await mesh.start_again(name)
    await scene.until_true("somebody leads again", lambda: mesh.holder(CONTROLLER_KEY))
    await scene.change()


async def until_agents_are_heard(mesh: ControlMesh, *, since: float = 0.0) -> None:
    """All agents are at home with the leader, and have been heard after a moment of the wall clock."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, KeyError):
                nodes = await _nodes(mesh, mesh.holder(CONTROLLER_KEY))
                heard = [node for node in nodes if node.present and node.HasField("heard_at")]
                if sum(node.heard_at.ToNanoseconds() / 1e9 >= since for node in heard) == len(mesh.agents):
                    return
            await asyncio.sleep(0.1)


async def until_served(edge: str, model: str = MODEL) -> None:
    """The router has finished a request for a model."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://{edge}/v1/chat/completions", data=body, headers={"content-type": "application/json"}
    )
    async with asyncio.timeout(LIMIT_SECONDS):
        while not await asyncio.to_thread(_is_ok, request):
            await asyncio.sleep(0.02)


def _is_ok(request: urllib.request.Request) -> bool:
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310  Loopback.
            answer.read()
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
    return True


async def _nodes(mesh: ControlMesh, name: str) -> list[pb.NodeEntry]:
    async with open_channel(mesh.services[name].address, retries=False) as channel:
        return list((await ControllerServiceStub(channel).ListNodes(pb.ListNodesRequest(), timeout=2)).nodes)


async def _alias(mesh: ControlMesh, name: str) -> str:
    """The model's alias in the cluster state that a controller gives away."""
    async with open_channel(mesh.services[name].address, retries=False) as channel:
        call = ControllerServiceStub(channel).WatchCluster(pb.WatchClusterRequest(subscriber="late"))
        response = await asyncio.wait_for(call.read(), LIMIT_SECONDS)
        assert isinstance(response, pb.WatchClusterResponse)
        call.cancel()
    return str(response.state.models[0].aliases[0])
