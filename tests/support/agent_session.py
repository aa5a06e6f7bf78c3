"""An agent without a server and a bus of its own, in session with controllers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvist.events.v1.events_pb2 import Tombstone
from kvist.grpc import open_channel
from kvist_agent.attached import AttachedEngines
from kvist_agent.inventory import read_inventory
from kvist_agent.session import ControllerSession, Introduction
from kvist_agent.slot_files import StateFolder
from kvist_agent.slots import WorkerSlots
from kvist_agent.worker_client import GrpcWorkerClient
from support.fake_worker_command import fake_worker_command


@contextlib.asynccontextmanager
async def agent_of(
    root: Path, addresses: list[str], *, join_token_file: Path | None = None
) -> AsyncIterator[WorkerSlots]:
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
            join_token_file=join_token_file,
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(session.run(channels))
            try:
                yield slots
            finally:
                running.cancel()
                await slots.stop_all()
