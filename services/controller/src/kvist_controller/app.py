"""The life of a controller: open the store, follow it, listen, lead again and again, stop."""

import asyncio
from functools import partial

from prometheus_client import Counter, Gauge

from kvist import names
from kvist.admin import AdminServer
from kvist.controller.v1.controller_pb2 import DESCRIPTOR
from kvist.controller.v1.controller_pb2_grpc import add_ControllerServiceServicer_to_server
from kvist.election_metrics import ElectionMetrics
from kvist.errors import PreconditionError
from kvist.grpc import GrpcServer, Registration, TlsFiles
from kvist.runner import Process
from kvist.state_store import serve_with_store
from kvist.store import StateStore, StoreError
from kvist.store.election import Leadership, lead
from kvist.telemetry import logger
from kvist_controller.control import Controller
from kvist_controller.follower import Follower
from kvist_controller.instance import Instance
from kvist_controller.presence import PresenceTimes
from kvist_controller.published import PublishedState
from kvist_controller.records import Keys, LeaderRecord
from kvist_controller.service import ControllerService
from kvist_controller.settings import ControllerSettings
from kvist_controller.silence import Silence, answers

SERVICE_NAME = DESCRIPTOR.services_by_name["ControllerService"].full_name
RETRY_SECONDS = 0.5

_log = logger(__name__)


class ControllerApp:
    """One controller process. It answers whether it leads or not, and leads whenever it is elected."""

    def __init__(self, process: Process[ControllerSettings]) -> None:
        self._process = process
        self._settings = process.settings
        self._keys = Keys(process.settings.cluster)
        self._instance: Instance | None = None
        self._differences = Counter(
            names.STORE_DIFFERENCES,
            "Keys that a comparison with the store found different from what this process had.",
            registry=process.registry,
        )
        Gauge(
            names.CONTROLLER_STRANGE_WORKERS,
            "Workers of another store that are left alone, since this one has no resource.",
            registry=process.registry,
        ).set_function(self._strange_workers)
        self._metrics = ElectionMetrics(
            process.registry,
            is_leading=lambda: self._instance is not None and self._instance.leading is not None,
            is_store_up=lambda: self._instance is not None and self._instance.follower.is_current,
        )

    async def run(self) -> None:
        """Serves until the process is asked to stop."""
        process = self._process
        process.readiness.block("leadership", "the store was not read yet, or nobody has led yet")
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(serve_with_store(self._settings.store, self._serve))
            await process.stopping.wait()
            serving.cancel()

    async def _serve(self, store: StateStore) -> None:
        settings, process = self._settings, self._process
        published = PublishedState()
        follower = Follower(store, self._keys, published, on_difference=self._note_differences)
        instance = Instance(
            LeaderRecord(settings.name, settings.reached_as),
            follower,
            published,
            peer_tls=TlsFiles.of(settings.controller_tls_ca_file or settings.tls_ca_file, settings.grpc),
            join_token_file=settings.join_token_file,
        )
        self._instance = instance
        service = ControllerService(instance, settings.registry)
        server = GrpcServer(
            settings.grpc,
            services=[Registration(SERVICE_NAME, partial(add_ControllerServiceServicer_to_server, service))],
            registry=process.registry,
        )
        async with (
            AdminServer(
                settings.telemetry.admin_listen, registry=process.registry, readiness=process.readiness
            ) as admin,
            server,
        ):
            instance.identity = LeaderRecord(settings.name, settings.reached_as or server.address)
            process.announce(grpc_address=server.address, admin_address=admin.address)
            process.readiness.clear("start")
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(follower.run())
                    group.create_task(self._lead_again_and_again(store, instance))
                    group.create_task(self._become_ready(instance, server))
                    group.create_task(self._count_leaders(follower))
            finally:
                process.readiness.block("stopping", "the process is being stopped")
                await server.stop(grace_seconds=0.2)
                await instance.close()

    def _strange_workers(self) -> float:
        leading = None if self._instance is None else self._instance.leading
        return 0.0 if leading is None else float(leading.strange_workers)

    def _note_differences(self, keys: int) -> None:
        self._differences.inc(keys)

    async def _become_ready(self, instance: Instance, server: GrpcServer) -> None:
        """Ready once the store was read and somebody leads; a later outage takes nobody out of service."""
        changes = instance.follower.leader_changes
        while not instance.follower.has_read or (instance.leading is None and instance.remote_leader() is None):
            await changes.after(changes.number)
        self._process.readiness.clear("leadership")
        await server.set_serving(True)

    async def _count_leaders(self, follower: Follower) -> None:
        while True:
            number = follower.leader_changes.number
            self._metrics.note_leader("" if follower.leader is None else follower.leader.encode())
            await follower.leader_changes.after(number)

    async def _lead_again_and_again(self, store: StateStore, instance: Instance) -> None:
        settings = self._settings
        while True:
            async with lead(
                store,
                self._keys.election,
                identity=instance.identity.encode(),
                ttl_seconds=settings.leader_lease_seconds,
            ) as leadership:
                try:
                    await self._lead(store, leadership, instance)
                except* PreconditionError as failures:
                    _log.warning("leadership_ended", reason=str(failures.exceptions[0]))
                except* StoreError as failures:
                    _log.warning("leadership_ended", reason=str(failures.exceptions[0]))
                    await asyncio.sleep(RETRY_SECONDS)

    async def _lead(self, store: StateStore, leadership: Leadership, instance: Instance) -> None:
        """One term, until it is lost.

        Raises:
            PreconditionError: Somebody else leads already.
            StoreError: The store does not answer at the beginning, or has gone back to an older state.
        """
        settings = self._settings
        controller = Controller(
            store,
            leadership,
            cluster=settings.cluster,
            times=PresenceTimes(
                lease_seconds=settings.registry.lease_seconds,
                replace_after_seconds=settings.registry.replace_after_seconds,
            ),
            published=instance.published,
            silence=Silence(partial(answers, tls=TlsFiles.of(settings.tls_ca_file, settings.grpc))),
        )
        await controller.load()
        await controller.reconcile()
        instance.set_leading(controller)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(controller.run()), group.create_task(controller.watch_silent_nodes())]
                await leadership.lost.wait()
                for task in tasks:
                    task.cancel()
        finally:
            instance.set_leading(None)


async def main(process: Process[ControllerSettings]) -> None:
    """Runs a controller."""
    await ControllerApp(process).run()
