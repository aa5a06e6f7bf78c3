"""The life of a KV master: start the index, follow the cluster state, serve, stop."""

import asyncio
import json
from contextlib import AsyncExitStack
from functools import partial

from prometheus_client import Counter

from kvist import _core, names
from kvist.admin import AdminServer
from kvist.cluster_watch import ClusterWatch
from kvist.controller.v1.controller_pb2 import ClusterState, ClusterVersion
from kvist.core_telemetry import start_core_telemetry
from kvist.errors import core_errors
from kvist.grpc import Channels, GrpcServer, Registration, TlsFiles
from kvist.kvmaster.v1.kvmaster_pb2 import DESCRIPTOR
from kvist.kvmaster.v1.kvmaster_pb2_grpc import add_KvMasterServiceServicer_to_server
from kvist.runner import Process
from kvist.telemetry import logger
from kvist_kvmaster.index_metrics import IndexCollector
from kvist_kvmaster.service import KvMasterService
from kvist_kvmaster.settings import KvMasterSettings
from kvist_kvmaster.standing import Standing

SERVICE_NAME = DESCRIPTOR.services_by_name["KvMasterService"].full_name

_log = logger(__name__)


async def main(process: Process[KvMasterSettings]) -> None:
    """Runs a KV master until the process is asked to stop."""
    settings = process.settings
    start_core_telemetry(settings.telemetry, service="kvist-kvmaster", instance=settings.name)
    process.readiness.block("cluster_state", "no cluster state was seen yet")
    runtime = _core.Runtime(settings.worker_threads)
    try:
        with core_errors():
            index = _core.IndexService(runtime, json.dumps(core_settings(settings)))
            await asyncio.to_thread(index.start)
        process.registry.register(IndexCollector(index))
        try:
            await _serve(process, index)
        finally:
            await asyncio.to_thread(index.stop)
    finally:
        await asyncio.to_thread(runtime.close)
        await asyncio.to_thread(_core.shutdown_telemetry)


def core_settings(settings: KvMasterSettings) -> dict[str, object]:
    """What the index is told."""
    core: dict[str, object] = {
        "nats_url": ",".join(settings.bus.urls),
        "cluster": settings.cluster,
        "client_name": settings.name,
        "byte_budget": settings.index_byte_budget,
    }
    if settings.bus.credentials_file is not None:
        core["credentials_file"] = str(settings.bus.credentials_file)
    if settings.bus.tls_ca_file is not None:
        core["tls_ca_file"] = str(settings.bus.tls_ca_file)
    tls = TlsFiles.of(settings.tls_ca_file, settings.grpc)
    if tls is not None:
        core["tls"] = tls.core_tls(settings.grpc.tls_role_uri)
    return core


async def _serve(process: Process[KvMasterSettings], index: _core.IndexService) -> None:
    settings = process.settings
    standing = Standing(
        settings.store, cluster=settings.cluster, name=settings.name, lease_seconds=settings.leader_lease_seconds
    )
    standing.measure(process.registry)
    service = KvMasterService(index, standing)
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(
            AdminServer(settings.telemetry.admin_listen, registry=process.registry, readiness=process.readiness)
        )
        server = await stack.enter_async_context(
            GrpcServer(
                settings.grpc,
                services=[
                    Registration(
                        SERVICE_NAME,
                        partial(add_KvMasterServiceServicer_to_server, service),
                        # What gateways may ask for each of their requests.
                        unpaced=("Lookup",),
                    )
                ],
                registry=process.registry,
            )
        )
        tls = TlsFiles.of(settings.controller_tls_ca_file or settings.tls_ca_file, settings.grpc)
        channels = await stack.enter_async_context(Channels(settings.controllers, tls=tls))

        ignored = Counter(
            names.CLUSTER_STATES_IGNORED,
            "Cluster states that were not taken up.",
            [names.LABEL_REASON],
            registry=process.registry,
        )
        applied_version = ClusterVersion()

        async def take(state: ClusterState) -> None:
            nonlocal applied_version
            try:
                applied = await asyncio.to_thread(index.apply_cluster_state, state.SerializeToString())
            except (ValueError, _core.CoreError) as failure:
                ignored.labels("invalid").inc()
                _log.error("cluster_state_refused", revision=state.version.revision, reason=str(failure))
                return
            if not applied and state.version != applied_version:
                # A newer one that is not taken up is of a store that knows none of the workers.
                is_newer = state.version.store_epoch > applied_version.store_epoch
                ignored.labels("held" if is_newer else "older").inc()
                _log.warning(
                    "cluster_state_ignored",
                    store_epoch=state.version.store_epoch,
                    revision=state.version.revision,
                    applied_store_epoch=applied_version.store_epoch,
                    applied_revision=applied_version.revision,
                )
            if applied:
                applied_version = state.version
                service.set_synced()
                process.readiness.clear("cluster_state")
                await server.set_serving(True)

        watch = ClusterWatch(subscriber=settings.name, on_state=take, on_connected=_note_connection)
        process.announce(grpc_address=server.address, admin_address=admin.address)
        process.readiness.clear("start")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(watch.run(channels)), group.create_task(standing.run())]
            await process.stopping.wait()
            process.readiness.block("stopping", "the process is being stopped")
            await server.set_serving(False)
            for task in tasks:
                task.cancel()


def _note_connection(is_connected: bool) -> None:
    _log.info("control_plane_connection", is_connected=is_connected)
