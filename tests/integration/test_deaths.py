"""Death is a fact, silence is not: what indexes say of workers that are gone, and of workers that are only quiet."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from kvist.controller.v1.controller_pb2 import ClusterState
from kvist.events.v1.events_pb2 import SOURCE_STATE_EXACT, SOURCE_STATE_STALE, Tombstone
from kvist.grpc import open_channel
from kvist.kvmaster.v1.kvmaster_pb2_grpc import KvMasterServiceStub
from kvist.router.v1.router_pb2 import SourceStatus
from kvist.router.v1.router_pb2_grpc import RouterServiceStub
from support.machine_load import MachineLoad
from support.mesh import Mesh, running_mesh, until
from support.nats_proxy import Message, NatsProxy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

WORKERS = 3
# From the statement of a death to the moment when no index says anything of the dead any more.
MOST_SECONDS_TO_FORGET = 1.0
# Sources are STALE after three digest intervals of the index without a word; the lease has to be longer.
SILENCE_SECONDS = 15.0
LEASE_SECONDS = 22.0


class Views:
    """What router and KV master say."""

    def __init__(self, mesh: Mesh, router: RouterServiceStub, kvmaster: KvMasterServiceStub) -> None:
        self._mesh, self._router, self._kvmaster = mesh, router, kvmaster

    async def of(self, uid: str) -> list[SourceStatus]:
        """Each index's source of a worker, as far as it has one."""
        seen = await self._mesh.sources(self._router, self._kvmaster)
        return [status for sources in seen.values() for status in sources if status.source.worker_uid == uid]

    async def until(self, what: str, uid: str, condition: Callable[[list[SourceStatus]], bool]) -> float:
        """When both indexes were seen to be so."""
        async with asyncio.timeout(90):
            while not condition(await self.of(uid)):
                await asyncio.sleep(0.01)
        return time.monotonic()


def both_are(state: int) -> Callable[[list[SourceStatus]], bool]:
    return lambda seen: [state, state] == [status.state for status in seen]


def both_have_forgotten(incarnation: int) -> Callable[[list[SourceStatus]], bool]:
    return lambda seen: all(status.source.incarnation != incarnation for status in seen)


async def test_the_dead_are_forgotten_within_a_second_and_the_silent_are_not(tmp_path: Path) -> None:
    """R23, R24, R33.

    Seconds are those of a machine that has nothing else to do, as in `test_history.py`.
    """
    mesh = Mesh(tmp_path)
    tombstones: dict[tuple[str, int], float] = {}

    def note(message: Message) -> Message:
        if ".tombstone." in message.subject:
            tombstone = Tombstone.FromString(message.payload)
            tombstones.setdefault((tombstone.worker_uid, tombstone.incarnation), time.monotonic())
        return message

    async with AsyncExitStack() as stack:
        proxies = {name: await stack.enter_async_context(NatsProxy(mesh.nats.port)) for name in ("agent-0", "agent-1")}
        for proxy in proxies.values():
            proxy.change = note
        urls = {name: proxy.url for name, proxy in proxies.items()}
        registry = {"registry.lease_seconds": LEASE_SECONDS}
        await stack.enter_async_context(running_mesh(mesh, agents=2, bus_urls=urls, controller=registry))
        router = RouterServiceStub(await stack.enter_async_context(open_channel(mesh.services["router"].address)))
        kvmaster = KvMasterServiceStub(await stack.enter_async_context(open_channel(mesh.services["kvmaster"].address)))
        views = Views(mesh, router, kvmaster)
        await mesh.apply(replicas=WORKERS, engine_arguments={})
        await until("all workers are there", lambda: mesh.sees_workers(WORKERS))
        for worker in mesh.state.workers:
            await views.until("exact", worker.target.worker_uid, both_are(SOURCE_STATE_EXACT))
        await a_worker_dies(mesh, views, tombstones)
        await until("all workers are there", lambda: mesh.sees_workers(WORKERS))
        await a_node_falls_silent_and_dies(mesh, views, tombstones)


async def a_worker_dies(mesh: Mesh, views: Views, tombstones: dict[tuple[str, int], float]) -> None:
    """Its agent says so, and both indexes forget it."""
    victim = mesh.state.workers[0]
    uid, incarnation = victim.target.worker_uid, victim.incarnation
    before = MachineLoad.now(await mesh.process_ids())
    psutil.Process((await mesh.workers())[uid].process_id).kill()
    forgotten_at = await views.until("forgotten", uid, both_have_forgotten(incarnation))
    share = await before.share_left_by_others(await mesh.process_ids())
    seconds = forgotten_at - tombstones[uid, incarnation]
    print(f"forgotten by both indexes {seconds:.3f} s after the tombstone; others left {share:.0%} of the machine")
    assert seconds <= MOST_SECONDS_TO_FORGET / share


async def a_node_falls_silent_and_dies(mesh: Mesh, views: Views, tombstones: dict[tuple[str, int], float]) -> None:
    """While it is silent its blocks stay; after its lease the controller leaves it out, and both indexes forget it."""
    workers = await mesh.workers()
    by_node: dict[str, list[str]] = {}
    for worker in mesh.state.workers:
        by_node.setdefault(worker.node_uid, []).append(worker.target.worker_uid)
    node_uid = mesh.services["agent-1"].addresses["node_uid"]
    uids, others = by_node.pop(node_uid), [uid for rest in by_node.values() for uid in rest]
    incarnations = {worker.target.worker_uid: worker.incarnation for worker in mesh.state.workers}
    left_out_at: list[float] = []

    def note(state: ClusterState) -> None:
        if not {worker.target.worker_uid for worker in state.workers} & set(uids):
            left_out_at.append(time.monotonic())

    for uid in uids:
        await views.until("exact", uid, both_are(SOURCE_STATE_EXACT))
    mesh.on_state = note
    processes = [psutil.Process(mesh.process_id("agent-1")), *(psutil.Process(workers[uid].process_id) for uid in uids)]
    silent_since = time.monotonic()
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    for uid in uids:
        await views.until("stale", uid, both_are(SOURCE_STATE_STALE))
    print(f"stale {time.monotonic() - silent_since:.1f} s after the last word")
    assert not left_out_at, "the lease was shorter than the silence"
    # Frozen processes die of this without having said a word.
    before = MachineLoad.now(await mesh.process_ids())
    for process in processes:
        process.kill()
    await until("the lease has ended", lambda: left_out_at)
    forgotten_at = max([await views.until("forgotten", uid, both_have_forgotten(incarnations[uid])) for uid in uids])
    share = await before.share_left_by_others(await mesh.process_ids())
    print(
        f"left out {left_out_at[0] - silent_since:.1f} s after the last word; "
        f"forgotten by both indexes {forgotten_at - left_out_at[0]:.3f} s later"
    )
    assert forgotten_at - left_out_at[0] <= MOST_SECONDS_TO_FORGET / share
    assert not {(uid, incarnations[uid]) for uid in uids} & tombstones.keys(), "somebody has seen them die"
    # The other node has noticed nothing.
    for uid in others:
        await views.until("exact", uid, both_are(SOURCE_STATE_EXACT))
