"""An agent's session with a controller: registration, assignment, death, and a controller that comes back."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvist.controller.v1 import controller_pb2 as pb
from kvist.events.v1.events_pb2 import Tombstone
from kvist.grpc import open_channel
from kvist_agent.attached import AttachedEngines
from kvist_agent.inventory import read_inventory
from kvist_agent.session import ControllerSession, Introduction
from kvist_agent.slot_files import StateFolder
from kvist_agent.slots import WorkerSlots
from kvist_agent.worker_client import GrpcWorkerClient
from support.control_plane import ClusterReader, control_plane, manifest
from support.fake_worker_command import fake_worker_command

LIMIT_SECONDS = 40


@contextlib.asynccontextmanager
async def agent_of(root: Path, addresses: list[str]) -> AsyncIterator[WorkerSlots]:
    """An agent without its own server and bus; its workers end with it."""
    folder = StateFolder(root)

    async def publish(_: Tombstone) -> None:
        """The bus is another test's matter."""

    inventory = read_inventory(node_uid=folder.node_uid(), name="node", labels={}, engines=["sim"])
    async with contextlib.AsyncExitStack() as stack:
        slots = await stack.enter_async_context(
            WorkerSlots(
                folder,
                node_uid=inventory.node_uid,
                command=fake_worker_command,
                client=GrpcWorkerClient(),
                publish_tombstone=publish,
            )
        )
        channels = [await stack.enter_async_context(open_channel(address, retries=False)) for address in addresses]
        session = ControllerSession(
            Introduction(inventory, address="127.0.0.1:1", admin_address=""),
            slots=slots,
            attached=AttachedEngines(
                (), folder=folder.attached, node_uid=inventory.node_uid, registry=CollectorRegistry()
            ),
            on_welcome=lambda _: None,
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(session.run(channels))
            try:
                yield slots
            finally:
                running.cancel()
                await slots.stop_all()


async def test_an_applied_service_is_served_and_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(LIMIT_SECONDS),
        control_plane(tmp_path / "s") as plane,
        # The first address refuses; the agent goes on to the next.
        agent_of(tmp_path / "agent", ["127.0.0.1:9", plane.address]) as slots,
    ):
        cluster = ClusterReader(plane.stub)
        await plane.stub.Apply(pb.ApplyRequest(resource=manifest(replicas=1)))
        state = await cluster.until(lambda state: state.workers)
        [status] = slots.statuses()
        assert state.workers[0].target.address == status.address
        incarnation = state.workers[0].incarnation
        os.kill(status.process_id, signal.SIGKILL)
        dead = await cluster.until(lambda state: not state.workers)
        assert [death.incarnation for death in dead.dead_incarnations] == [incarnation]
        state = await cluster.until(lambda state: state.workers)
        assert state.workers[0].incarnation > incarnation
        assert state.workers[0].target.worker_uid == status.spec.worker_uid
        await plane.stub.Delete(pb.DeleteRequest(kind="ModelService", name="smol"))
        await cluster.until(lambda state: not state.models)
        assert slots.statuses() == []


async def test_workers_run_on_while_the_controller_is_away(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_SECONDS), contextlib.AsyncExitStack() as stack:
        async with control_plane(tmp_path / "s") as plane:
            address = plane.address
            slots = await stack.enter_async_context(agent_of(tmp_path / "agent", [address]))
            await plane.stub.Apply(pb.ApplyRequest(resource=manifest(replicas=1)))
            before = await ClusterReader(plane.stub).until(lambda state: state.workers)
            process_id = slots.statuses()[0].process_id
        async with control_plane(tmp_path / "s", listen=address) as plane:
            while not any(node.heard_at.seconds for node in plane.controller.node_entries()):
                await plane.controller.order_changes.after(plane.controller.order_changes.number)
            assert plane.controller.cluster_state == before
            assert slots.statuses()[0].process_id == process_id
