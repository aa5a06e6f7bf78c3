"""Worker slots with real processes: start, death, restart, re-attachment, drain, fences."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from kvist.agent.v1.agent_pb2 import (
    WORKER_PHASE_BACKING_OFF,
    WORKER_PHASE_READY,
    WorkerSpec,
    WorkerStatus,
)
from kvist.errors import PreconditionError
from kvist.events.v1.events_pb2 import Tombstone
from kvist_agent.event_plane import relayed_workers
from kvist_agent.settings import WorkerSettings
from kvist_agent.slot_files import SlotFolder, StateFolder
from kvist_agent.slots import WorkerSlots
from kvist_agent.worker_client import GrpcWorkerClient

FAKE_WORKER = Path(__file__).parents[1] / "support" / "fake_worker.py"
LIMIT_SECONDS = 40


def command(folder: SlotFolder) -> list[str]:
    return [
        sys.executable, str(FAKE_WORKER),
        "--settings-file", str(folder.settings_path), "--ready-file", str(folder.ready_path),
    ]  # fmt: skip


def spec(uid: str = "w-0", **arguments: object) -> WorkerSpec:
    made = WorkerSpec(worker_uid=uid, model="smol", engine="sim", pool_uid="p", pool_revision="r", hash_seed=7)
    made.engine_arguments.update(arguments)
    return made


class Node:
    """One agent's slots over a state folder, and the tombstones it announced."""

    def __init__(self, root: Path) -> None:
        self.folder = StateFolder(root)
        self.tombstones: list[Tombstone] = []
        self.settings = WorkerSettings()
        self.advertised_host = ""

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[WorkerSlots]:
        async def publish(tombstone: Tombstone) -> None:
            self.tombstones.append(tombstone)

        async with WorkerSlots(
            self.folder,
            node_uid="node-a",
            command=command,
            client=GrpcWorkerClient(),
            publish_tombstone=publish,
            settings=self.settings,
            advertised_host=self.advertised_host,
        ) as slots:
            yield slots


async def until(slots: WorkerSlots, condition: Callable[[dict[str, WorkerStatus]], bool]) -> dict[str, WorkerStatus]:
    while True:
        number = slots.changes.number
        statuses = {status.spec.worker_uid: status for status in slots.statuses()}
        if condition(statuses):
            return statuses
        await slots.changes.after(number)


async def until_ready(slots: WorkerSlots, uid: str = "w-0", *, above: int = 0) -> WorkerStatus:
    def is_ready(statuses: dict[str, WorkerStatus]) -> bool:
        status = statuses.get(uid)
        return status is not None and status.phase == WORKER_PHASE_READY and status.description.incarnation > above

    return (await until(slots, is_ready))[uid]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    async with asyncio.timeout(LIMIT_SECONDS):
        yield node
        async with node.run() as slots:
            await slots.stop_all()


async def test_a_killed_worker_is_announced_and_started_again(node: Node) -> None:
    async with node.run() as slots:
        slots.assign([spec()], fence=1)
        first = await until_ready(slots)
        os.kill(first.process_id, signal.SIGKILL)
        second = await until_ready(slots, above=first.description.incarnation)
        assert second.restarts == 1
        assert second.dead_incarnation == first.description.incarnation
        assert [(t.worker_uid, t.incarnation, t.reason) for t in node.tombstones] == [
            ("w-0", first.description.incarnation, "signal SIGKILL")
        ]


async def test_workers_outlive_their_agent_which_attaches_again(node: Node) -> None:
    async with node.run() as slots:
        slots.assign([spec()], fence=1)
        before = await until_ready(slots)
    assert psutil.pid_exists(before.process_id)
    async with node.run() as slots:
        # What a controller hears first is what is true, not that everything starts anew.
        await slots.attached(time_limit_seconds=LIMIT_SECONDS)
        (after,) = slots.statuses()
        assert after.phase == WORKER_PHASE_READY
        assert after.process_id == before.process_id
        assert after.description.incarnation == before.description.incarnation
        assert after.restarts == 0
        # A re-attached worker is no child of this agent's, and its death is seen all the same.
        os.kill(after.process_id, signal.SIGKILL)
        await until_ready(slots, above=before.description.incarnation)
    assert [tombstone.incarnation for tombstone in node.tombstones] == [before.description.incarnation]


async def test_a_worker_that_died_while_the_agent_was_away_is_announced(node: Node) -> None:
    async with node.run() as slots:
        slots.assign([spec()], fence=1)
        before = await until_ready(slots)
    os.kill(before.process_id, signal.SIGKILL)
    while psutil.pid_exists(before.process_id) and psutil.Process(before.process_id).status() != "zombie":
        await asyncio.sleep(0.01)
    async with node.run() as slots:
        await until_ready(slots, above=before.description.incarnation)
    assert [tombstone.incarnation for tombstone in node.tombstones] == [before.description.incarnation]


async def test_a_slot_that_is_not_assigned_any_more_is_drained_and_gone(node: Node) -> None:
    async with node.run() as slots:
        slots.assign([spec("w-0"), spec("w-1")], fence=6)
        ended = await until_ready(slots, "w-0")
        kept = await until_ready(slots, "w-1")
        slots.assign([spec("w-1")], fence=6)
        statuses = await until(slots, lambda statuses: "w-0" not in statuses)
        assert statuses["w-1"].process_id == kept.process_id
        assert not psutil.pid_exists(ended.process_id)
        assert [folder.path.name for folder in node.folder.slots()] == ["w-1"]
    assert [(t.worker_uid, t.incarnation) for t in node.tombstones] == [("w-0", ended.description.incarnation)]


async def test_a_changed_specification_restarts_after_a_drain_and_changed_limits_do_not(node: Node) -> None:
    async with node.run() as slots:
        slots.assign([spec()], fence=3)
        first = await until_ready(slots)
        limited = spec()
        limited.drain_time_limit.FromSeconds(5)
        slots.assign([limited], fence=3)
        kept = await until(slots, lambda statuses: statuses["w-0"].spec == limited)
        assert kept["w-0"].process_id == first.process_id
        slots.assign([spec(blocks=8)], fence=3)
        second = await until_ready(slots, above=first.description.incarnation)
        assert second.spec.engine_arguments["blocks"] == 8
        assert (node.folder.slot("w-0").path / "drained").read_text() == "3"


async def test_a_worker_that_ends_at_once_backs_off_and_can_be_stopped(node: Node) -> None:
    async with node.run() as slots:
        slots.assign([spec(exit_code=3)], fence=1)
        statuses = await until(slots, lambda statuses: statuses["w-0"].restarts >= 1)
        statuses = await until(slots, lambda statuses: statuses["w-0"].phase == WORKER_PHASE_BACKING_OFF)
        assert statuses["w-0"].message == "exit code 3"
        slots.stop("w-0", fence=1)
        await until(slots, lambda statuses: not statuses)


async def test_a_worker_that_is_not_ready_in_time_is_killed(node: Node) -> None:
    async with node.run() as slots:
        slow = spec(never_ready=True)
        slow.startup_time_limit.FromMilliseconds(300)
        slots.assign([slow], fence=1)
        statuses = await until(slots, lambda statuses: "was not ready" in statuses["w-0"].message)
        assert statuses["w-0"].phase == WORKER_PHASE_BACKING_OFF


async def test_a_frozen_worker_is_killed_and_started_again(node: Node) -> None:
    node.settings = WorkerSettings(liveness_interval_seconds=0.1, liveness_time_limit_seconds=0.4, liveness_failures=2)
    async with node.run() as slots:
        slots.assign([spec()], fence=1)
        first = await until_ready(slots)
        os.kill(first.process_id, signal.SIGSTOP)
        second = await until_ready(slots, above=first.description.incarnation)
        assert (second.restarts, second.dead_incarnation) == (1, first.description.incarnation)
        assert not psutil.pid_exists(first.process_id)
        assert [(t.incarnation, t.reason) for t in node.tombstones] == [
            (first.description.incarnation, "did not answer 2 times in a row")
        ]


async def test_a_worker_that_froze_while_the_agent_was_away_is_started_again(node: Node) -> None:
    node.settings = WorkerSettings(liveness_interval_seconds=0.1, liveness_time_limit_seconds=0.4, liveness_failures=2)
    async with node.run() as slots:
        slots.assign([spec()], fence=1)
        first = await until_ready(slots)
    os.kill(first.process_id, signal.SIGSTOP)
    async with node.run() as slots:
        # Long before the ten minutes that a worker may take to load.
        second = await until_ready(slots, above=first.description.incarnation)
        assert second.dead_incarnation == first.description.incarnation


async def test_a_frozen_worker_does_not_hold_up_its_end(node: Node) -> None:
    node.settings = WorkerSettings(liveness_interval_seconds=0.1, liveness_time_limit_seconds=0.4, liveness_failures=2)
    async with node.run() as slots:
        slots.assign([spec()], fence=1)
        first = await until_ready(slots)
        os.kill(first.process_id, signal.SIGSTOP)
        slots.stop("w-0", fence=1)
        # Far below the half minute of a drain.
        async with asyncio.timeout(15):
            await until(slots, lambda statuses: not statuses)
        assert not psutil.pid_exists(first.process_id)


async def test_a_worker_listens_and_is_advertised_where_the_settings_say(node: Node) -> None:
    node.settings = WorkerSettings(listen_host="0.0.0.0", insecure=True)  # noqa: S104  The point.
    node.advertised_host = "node-a.example"
    async with node.run() as slots:
        slots.assign([spec()], fence=1)
        status = await until_ready(slots)
        host, _, port = status.address.rpartition(":")
        assert host == "node-a.example"
        # The node itself needs no name for its own workers.
        assert slots.slot("w-0").local_address == f"127.0.0.1:{port}"
        assert json.loads(relayed_workers(slots)) == [{"uid": "w-0", "address": f"127.0.0.1:{port}"}]
        told = json.loads(node.folder.slot("w-0").settings_path.read_text())
        assert (told["grpc_listen"], told["admin_listen"], told["insecure"]) == ("0.0.0.0:0", "0.0.0.0:0", True)


async def test_a_lower_fence_is_refused_until_another_cluster_is_entered(node: Node) -> None:
    async with node.run() as slots:
        slots.enter_cluster("c", hash_seed=1)
        slots.assign([], fence=9)
        with pytest.raises(PreconditionError) as caught:
            slots.start(spec(), fence=8)
        assert caught.value.code == "STALE_FENCE"
        slots.enter_cluster("c", hash_seed=1)
        with pytest.raises(PreconditionError):
            slots.assign([], fence=8)
        slots.enter_cluster("c", hash_seed=2)
        slots.assign([], fence=1)
