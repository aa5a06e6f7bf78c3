"""The control plane fails, part after part, while streaming requests run: no request notices.

Real processes on loopback: three etcd members, two controllers, two KV masters, two routers, two agents, simulated
workers. Limits in seconds are those of docs/reference/failover.md on a machine that has nothing else to do; on a busy
one they grow as the share that others leave shrinks. `KVIST_CHAOS_OUTAGE_SECONDS` says how long outages of the store
last, `KVIST_FAILOVER_RESULTS` names a file for the measured times.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from kvist.controller.v1 import controller_pb2 as pb
from kvist.controller.v1.controller_pb2_grpc import ControllerServiceStub
from kvist.grpc import open_channel
from kvist.kvmaster.v1.kvmaster_pb2 import INSTANCE_ROLE_LEADER, INSTANCE_ROLE_STANDBY
from support.control_mesh import CONTROLLER_KEY, KVMASTER_KEY, ControlMesh, control_mesh
from support.machine_load import MachineLoad
from support.mesh import until
from support.steady_load import SteadyLoad

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

OUTAGE_SECONDS = float(os.environ.get("KVIST_CHAOS_OUTAGE_SECONDS", "12"))
CONTROLLER_LEASE_SECONDS = 3.0
WORKERS = 2
DECODE_STEP_MS = 15
LIMIT_SECONDS = 60.0
MODEL = "sim"


@dataclass(slots=True)
class Measured:
    """Seconds that something took, and those that it may take."""

    rows: list[dict[str, object]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def step(self, name: str, *, limit_seconds: float, mesh: ControlMesh) -> AsyncIterator[list[float]]:
        """Measures what the block puts into the list it is given."""
        process_ids = await mesh.process_ids()
        load = MachineLoad.now(process_ids)
        seconds: list[float] = []
        yield seconds
        share = await load.share_left_by_others(process_ids)
        self.rows.append(
            {
                "fault": name,
                "seconds": round(seconds[0], 2),
                "limit_seconds": limit_seconds,
                "share_of_machine": round(share, 2),
            }
        )
        assert seconds[0] < limit_seconds / share, self.rows[-1]


async def test_no_request_notices_that_parts_of_the_control_plane_are_gone(tmp_path: Path) -> None:
    measured = Measured()
    async with control_mesh(tmp_path, controller_lease_seconds=CONTROLLER_LEASE_SECONDS) as mesh:
        await until("a controller leads", lambda: mesh.holder(CONTROLLER_KEY))
        await mesh.change(replicas=WORKERS, decode_step_ms=DECODE_STEP_MS)
        await until("all workers are there", lambda: mesh.sees_workers(WORKERS))
        workers = sorted(worker.target.worker_uid for worker in mesh.state.workers)
        await _until_served(mesh)
        load = SteadyLoad(mesh.edges, MODEL)
        async with load.running():
            await _controller_is_killed(mesh, measured)
            await _controller_is_paused(mesh, measured)
            await _kvmaster_fails(mesh, measured, signal.SIGKILL)
            await _kvmaster_fails(mesh, measured, signal.SIGSTOP)
            await _etcd_leader_fails(mesh, measured, "killed")
            await _etcd_leader_fails(mesh, measured, "frozen")
            await _store_is_away(mesh, measured, load)
        assert [] == load.bad(), load.kinds()
        assert len(load.outcomes) > 50
        assert workers == sorted(worker.target.worker_uid for worker in mesh.state.workers), "membership was not kept"

        retrying = SteadyLoad(mesh.edges, MODEL, most_attempts=2)
        async with retrying.running():
            await _router_starts_without_controllers(mesh, measured)
        # A stream that had begun on the router that was killed ends there, and says nothing else.
        torn = [outcome for outcome in retrying.bad() if outcome.kind != "torn"]
        assert [] == torn
        assert len(retrying.bad()) <= retrying.clients
        _check_claims(mesh)
    _write_results(measured, requests=len(load.outcomes) + len(retrying.outcomes))


async def _until_served(mesh: ControlMesh) -> None:
    """Both routers have finished a request."""
    async with asyncio.timeout(LIMIT_SECONDS):
        for edge in mesh.edges():
            probe = SteadyLoad(lambda edge=edge: [edge], MODEL, clients=1)
            while not probe.kinds()["finished"]:
                async with probe.running():
                    await asyncio.sleep(0.05)


async def _controller_is_killed(mesh: ControlMesh, measured: Measured) -> None:
    old = mesh.holder(CONTROLLER_KEY)
    limit = CONTROLLER_LEASE_SECONDS + 2
    async with measured.step("controller leader killed: another one leads", limit_seconds=limit, mesh=mesh) as seconds:
        await mesh.kill(old)
        started = time.monotonic()
        await mesh.until_led(CONTROLLER_KEY, by_other_than=old, limit_seconds=LIMIT_SECONDS)
        # It leads when it decides: a change of the resource comes through.
        await mesh.change(replicas=WORKERS, decode_step_ms=DECODE_STEP_MS)
        seconds.append(time.monotonic() - started)
    await _until_agents_are_heard(mesh)
    await mesh.start_again(old)


async def _until_agents_are_heard(mesh: ControlMesh) -> None:
    """Both agents are at home with the leader."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            with contextlib.suppress(Exception):
                nodes = await _nodes(mesh, mesh.holder(CONTROLLER_KEY))
                if sum(node.present and node.HasField("heard_at") for node in nodes) == 2:
                    return
            await asyncio.sleep(0.1)


async def _nodes(mesh: ControlMesh, name: str) -> list[pb.NodeEntry]:
    async with open_channel(mesh.services[name].address, retries=False) as channel:
        return list((await ControllerServiceStub(channel).ListNodes(pb.ListNodesRequest(), timeout=2)).nodes)


async def _controller_is_paused(mesh: ControlMesh, measured: Measured) -> None:
    """It wakes up after its lease, with heartbeats of agents in its sockets, and finds out before it acts."""
    old = mesh.holder(CONTROLLER_KEY)
    limit = CONTROLLER_LEASE_SECONDS + 2
    async with measured.step("controller leader frozen: another one leads", limit_seconds=limit, mesh=mesh) as seconds:
        mesh.send(old, signal.SIGSTOP)
        try:
            started = time.monotonic()
            new = ""
            await mesh.until_led(CONTROLLER_KEY, by_other_than=old, limit_seconds=LIMIT_SECONDS)
            new = mesh.holder(CONTROLLER_KEY)
            seconds.append(time.monotonic() - started)
            await _until_agents_are_heard(mesh)
            before = mesh.state.version.revision
        finally:
            mesh.send(old, signal.SIGCONT)
    log = mesh.folder / f"{old}.log"
    await until("the old leader has noticed", lambda: "leadership_lost" in log.read_text())
    # It answers as a standby: it passes on what only the leader knows.
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            with contextlib.suppress(Exception):
                if len(await _nodes(mesh, old)) == 2:
                    break
            await asyncio.sleep(0.1)
    assert new == mesh.holder(CONTROLLER_KEY), "the old leader took the lead back"
    assert before <= mesh.state.version.revision


async def _kvmaster_fails(mesh: ControlMesh, measured: Measured, fault: signal.Signals) -> None:
    await until("a KV master leads", lambda: mesh.holder(KVMASTER_KEY))
    old = mesh.holder(KVMASTER_KEY)
    standby = next(name for name in ("kvmaster-0", "kvmaster-1") if name != old)
    address = mesh.services[standby].address
    async with asyncio.timeout(LIMIT_SECONDS):
        while (await mesh.role_of(address))[0] != INSTANCE_ROLE_STANDBY:
            await asyncio.sleep(0.1)
    _, old_fence = await mesh.role_of(mesh.services[old].address)
    word = "killed" if fault is signal.SIGKILL else "frozen"
    async with measured.step(f"KV master leader {word}: the standby leads", limit_seconds=3.0, mesh=mesh) as seconds:
        started = time.monotonic()
        mesh.send(old, fault)
        roles: list[int] = []
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                # The standby answers all the while, and says which part it plays.
                roles.append((await mesh.lookup(address)).answered_by)
                if roles[-1] == INSTANCE_ROLE_LEADER:
                    break
                await asyncio.sleep(0.02)
        seconds.append(time.monotonic() - started)
    assert roles[0] == INSTANCE_ROLE_STANDBY
    assert (await mesh.role_of(address))[1] > old_fence > 0
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


async def _etcd_leader_fails(mesh: ControlMesh, measured: Measured, word: str) -> None:
    name = await mesh.etcd.leader()
    member = mesh.etcd.members[name]
    leaders = mesh.holder(CONTROLLER_KEY), mesh.holder(KVMASTER_KEY)
    async with measured.step(f"etcd leader {word}: a change is taken", limit_seconds=5.0, mesh=mesh) as seconds:
        started = time.monotonic()
        if word == "killed":
            member.kill()
        else:
            member.freeze()
        await mesh.change(replicas=WORKERS, decode_step_ms=DECODE_STEP_MS)
        seconds.append(time.monotonic() - started)
    if word == "killed":
        member.start()
    else:
        member.thaw()
    await member.until_listening()
    # Whether leaders of ours were changed by it depends on how busy the machine is; that there are any does not.
    await until("both have a leader", lambda: mesh.holder(CONTROLLER_KEY) and mesh.holder(KVMASTER_KEY))
    print(f"etcd leader {word}: leaders {leaders} -> {mesh.holder(CONTROLLER_KEY)}, {mesh.holder(KVMASTER_KEY)}")


async def _store_is_away(mesh: ControlMesh, measured: Measured, load: SteadyLoad) -> None:
    before = len(load.outcomes)
    members = mesh.etcd.members.values()
    version = mesh.state.version
    for member in members:
        member.kill()
    await asyncio.sleep(OUTAGE_SECONDS)
    assert len(load.outcomes) > before
    assert [] == load.bad(since=before)
    assert version == mesh.state.version, "the state changed without a store"
    # A new subscriber is served all the same.
    async with open_channel(mesh.controllers[0], retries=False) as channel:
        call = ControllerServiceStub(channel).WatchCluster(pb.WatchClusterRequest(subscriber="late"))
        response = await asyncio.wait_for(call.read(), LIMIT_SECONDS)
        assert isinstance(response, pb.WatchClusterResponse)
        assert len(response.state.workers) == WORKERS
        call.cancel()
    async with measured.step(
        "all of etcd back: a change is taken again", limit_seconds=CONTROLLER_LEASE_SECONDS + 7, mesh=mesh
    ) as seconds:
        for member in members:
            member.start()
        started = time.monotonic()
        await mesh.change(replicas=WORKERS, decode_step_ms=DECODE_STEP_MS)
        seconds.append(time.monotonic() - started)


async def _router_starts_without_controllers(mesh: ControlMesh, measured: Measured) -> None:
    for name in ("controller-0", "controller-1"):
        await mesh.kill(name)
    await mesh.kill("router-0")
    await asyncio.sleep(1)
    async with measured.step(
        "router started without any controller: it serves", limit_seconds=8.0, mesh=mesh
    ) as seconds:
        started = time.monotonic()
        await mesh.start_again("router-0")
        probe = SteadyLoad(lambda: [mesh.edges()[0]], MODEL, clients=1)
        async with asyncio.timeout(LIMIT_SECONDS):
            while not probe.kinds()["finished"]:
                async with probe.running():
                    await asyncio.sleep(0.05)
        seconds.append(time.monotonic() - started)
    for name in ("controller-0", "controller-1"):
        await mesh.start_again(name)
    await until("somebody leads again", lambda: mesh.holder(CONTROLLER_KEY))
    await mesh.change(replicas=WORKERS, decode_step_ms=DECODE_STEP_MS)


def _check_claims(mesh: ControlMesh) -> None:
    """One leader at a time in the store's history: no claim was made while another one lived."""
    for key in (CONTROLLER_KEY, KVMASTER_KEY):
        history = [(revision, value) for revision, claimed, value in mesh.claims if claimed == key]
        revisions = [revision for revision, _ in history]
        assert sorted(set(revisions)) == revisions
        is_held = False
        for _, value in history:
            assert is_held != (value is not None), f"two claims at once: {history}"
            is_held = value is not None


def _write_results(measured: Measured, *, requests: int) -> None:
    print(json.dumps(measured.rows, indent=2))
    path = os.environ.get("KVIST_FAILOVER_RESULTS")
    if path:
        machine = {"cores": os.cpu_count(), "memory_bytes": psutil.virtual_memory().total, "kernel": platform.release()}
        record = {
            "test": "tests/chaos/test_control_plane.py",
            "machine": machine,
            "controller_lease_seconds": CONTROLLER_LEASE_SECONDS,
            "store_outage_seconds": OUTAGE_SECONDS,
            "streaming_requests": requests,
            "failed_requests": 0,
            "rows": measured.rows,
        }
        Path(path).write_text(json.dumps(record, indent=2) + "\n")
