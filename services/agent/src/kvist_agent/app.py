"""The life of an agent: re-attach to workers, listen, register, relay, stop."""

import asyncio
import sys
from contextlib import AsyncExitStack
from functools import partial

from kvist.admin import AdminServer
from kvist.agent.v1.agent_pb2 import DESCRIPTOR
from kvist.agent.v1.agent_pb2_grpc import add_AgentServiceServicer_to_server
from kvist.controller.v1.controller_pb2 import RegisterWelcome
from kvist.grpc import Channels, GrpcServer, Registration, TlsFiles
from kvist.runner import Process
from kvist.settings import join_address, split_address
from kvist_agent.attached import AttachedEngines
from kvist_agent.event_plane import EventPlane
from kvist_agent.inventory import read_inventory, read_load
from kvist_agent.service import AgentService
from kvist_agent.session import ControllerSession, Introduction
from kvist_agent.settings import AgentSettings
from kvist_agent.slot_files import SlotFolder, StateFolder
from kvist_agent.slots import WorkerSlots
from kvist_agent.worker_client import GrpcWorkerClient

# A worker that is frozen holds up the agent's return by no more than this.
ATTACH_TIME_LIMIT_SECONDS = 5.0

SERVICE_NAME = DESCRIPTOR.services_by_name["AgentService"].full_name


async def main(process: Process[AgentSettings]) -> None:
    """Runs an agent until the process is asked to stop."""
    settings = process.settings
    folder = StateFolder(settings.state_folder.absolute())
    node_uid = folder.node_uid()
    worker_tls = None
    if settings.workers.tls_certificate_file is not None:
        worker_tls = TlsFiles.of(settings.tls_ca_file, settings.grpc)
    events = EventPlane(
        settings.bus,
        node_uid=node_uid,
        registry=process.registry,
        worker_tls=None if worker_tls is None else worker_tls.core_tls(settings.workers.tls_role_uri),
    )
    attached = AttachedEngines(settings.attach, folder=folder.attached, node_uid=node_uid, registry=process.registry)
    known = folder.read_session()
    events.enter_cluster(known.cluster)
    if known.cluster:
        attached.enter_cluster(known.hash_seed)
    client = GrpcWorkerClient(tls=worker_tls)
    inventory = read_inventory(
        node_uid=node_uid, name=settings.node_name, labels=settings.labels, engines=settings.workers.engines
    )
    read_load()  # The first reading of the processors' load only starts the measurement.
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(
            AdminServer(settings.telemetry.admin_listen, registry=process.registry, readiness=process.readiness)
        )
        slots = await stack.enter_async_context(
            WorkerSlots(
                folder,
                node_uid=node_uid,
                command=partial(_worker_command, settings.workers.command),
                client=client,
                publish_tombstone=events.publish_tombstone,
                settings=settings.workers,
                advertised_host=settings.reached_as,
            )
        )
        service = AgentService(slots, attached=attached, client=client, inventory=inventory)
        server = await stack.enter_async_context(
            GrpcServer(
                settings.grpc,
                services=[Registration(SERVICE_NAME, partial(add_AgentServiceServicer_to_server, service))],
                registry=process.registry,
            )
        )
        tls = TlsFiles.of(settings.controller_tls_ca_file or settings.tls_ca_file, settings.grpc)
        channels = await stack.enter_async_context(Channels(settings.controllers, tls=tls))
        address = server.address
        if settings.reached_as:
            address = join_address(settings.reached_as, split_address(address)[1])

        def on_welcome(welcome: RegisterWelcome) -> None:
            events.enter_cluster(welcome.cluster)
            attached.enter_cluster(welcome.hash_seed)
            process.readiness.clear("registration")

        session = ControllerSession(
            Introduction(inventory, address=address, admin_address=admin.address),
            slots=slots,
            attached=attached,
            on_welcome=on_welcome,
            join_token_file=settings.join_token_file,
        )
        await slots.attached(time_limit_seconds=ATTACH_TIME_LIMIT_SECONDS)
        process.announce(grpc_address=address, admin_address=admin.address, node_uid=node_uid)
        process.readiness.block("registration", "no controller has taken this node yet")
        process.readiness.clear("start")
        async with asyncio.TaskGroup() as group:
            attaching = group.create_task(attached.run())
            relaying = group.create_task(events.run(slots, attached))
            registering = group.create_task(session.run(channels))
            await server.set_serving(True)
            await process.stopping.wait()
            process.readiness.block("stopping", "the process is being stopped")
            await server.set_serving(False)
            if settings.workers.stop_on_exit:
                # The session stays open meanwhile, so that the controller sees the workers drain.
                await slots.stop_all()
            relaying.cancel()
            attaching.cancel()
            registering.cancel()


def _worker_command(program: tuple[str, ...], folder: SlotFolder) -> list[str]:
    start = list(program) or [sys.executable, "-m", "kvist_worker"]
    return [*start, "--settings-file", str(folder.settings_path), "--ready-file", str(folder.ready_path)]
