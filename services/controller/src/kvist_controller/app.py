"""The life of a controller: open the store, listen, lead, reconcile, stop."""

import asyncio
import contextlib
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from kvist.admin import AdminServer
from kvist.controller.v1.controller_pb2 import DESCRIPTOR
from kvist.controller.v1.controller_pb2_grpc import add_ControllerServiceServicer_to_server
from kvist.errors import PreconditionError
from kvist.grpc import GrpcServer, Registration
from kvist.runner import Process
from kvist.store.election import Leadership, lead
from kvist.store.sqlite import SqliteStore
from kvist_controller.control import Controller
from kvist_controller.presence import PresenceTimes
from kvist_controller.records import Keys
from kvist_controller.service import ControllerService
from kvist_controller.settings import ControllerSettings

_T = TypeVar("_T")

SERVICE_NAME = DESCRIPTOR.services_by_name["ControllerService"].full_name


class ControllerApp:
    """One controller process; it stands by until it leads, and ends when it leads no more."""

    def __init__(self, process: Process[ControllerSettings]) -> None:
        self._process = process
        self._settings = process.settings
        self._controller: Controller | None = None

    async def run(self) -> None:
        """Serves until the process is asked to stop.

        Raises:
            ExceptionGroup: Of a PreconditionError, when another controller has taken over.
        """
        settings, process = self._settings, self._process
        process.readiness.block("leadership", "another controller leads, or none was elected yet")
        service = ControllerService(lambda: self._controller, settings.registry)
        server = GrpcServer(
            settings.grpc,
            services=[Registration(SERVICE_NAME, partial(add_ControllerServiceServicer_to_server, service))],
            registry=process.registry,
        )
        async with (
            SqliteStore(settings.store.path) as store,
            AdminServer(
                settings.telemetry.admin_listen, registry=process.registry, readiness=process.readiness
            ) as admin,
            server,
        ):
            process.announce(grpc_address=server.address, admin_address=admin.address)
            process.readiness.clear("start")
            election = lead(
                store,
                Keys(settings.cluster).election,
                identity=settings.name,
                ttl_seconds=settings.leader_lease_seconds,
            )
            async with contextlib.AsyncExitStack() as stack:
                leadership = await _unless_stopped(stack.enter_async_context(election), process.stopping)
                if leadership is not None:
                    await self._lead(store, leadership, server)

    async def _lead(self, store: SqliteStore, leadership: Leadership, server: GrpcServer) -> None:
        settings, process = self._settings, self._process
        controller = Controller(
            store,
            leadership,
            cluster=settings.cluster,
            times=PresenceTimes(
                lease_seconds=settings.registry.lease_seconds,
                replace_after_seconds=settings.registry.replace_after_seconds,
            ),
        )
        await controller.load()
        await controller.reconcile()
        self._controller = controller
        process.readiness.clear("leadership")
        await server.set_serving(True)
        try:
            await _unless_stopped(_until_lost(controller, leadership), process.stopping)
        finally:
            process.readiness.block("stopping", "the process is being stopped")
            await server.stop(grace_seconds=0.2)
            self._controller = None


async def _until_lost(controller: Controller, leadership: Leadership) -> None:
    """Reconciles, and asks after the workers of silent nodes, until the leadership ends."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(controller.run()), group.create_task(controller.watch_silent_nodes())]
        await leadership.lost.wait()
        for task in tasks:
            task.cancel()
    raise PreconditionError("another controller has taken over")


async def _unless_stopped(work: Coroutine[Any, Any, _T], stopping: asyncio.Event) -> _T | None:
    """The result of work; none, and the work is cancelled, when the process is asked to stop before."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        stop = group.create_task(stopping.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        task.cancel()
    return None if task.cancelled() else task.result()


async def main(process: Process[ControllerSettings]) -> None:
    """Runs a controller."""
    await ControllerApp(process).run()
