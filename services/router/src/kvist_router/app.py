"""The life of a router: start the data plane, follow the cluster state, drain, stop. Or of an edge of other routers."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from kvist import _core
from kvist.controller.v1.controller_pb2 import ClusterState, ClusterVersion
from kvist.core_telemetry import start_core_telemetry
from kvist.errors import core_errors
from kvist.runner import Process
from kvist.telemetry import logger
from kvist.tls_files import TlsFiles
from kvist_router.settings import RouterSettings
from kvist_router.state_file import StaticState, read_state, write_state

_log = logger(__name__)


async def main(process: Process[RouterSettings]) -> None:
    """Runs a router until the process is asked to stop."""
    settings = process.settings
    start_core_telemetry(settings.telemetry, service="kvist-router", instance=settings.name)
    runtime = _core.Runtime(settings.worker_threads)
    try:
        core = json.dumps(core_settings(settings))
        with core_errors():
            server = _core.EdgeServer(runtime, core) if settings.is_edge_only else _core.RouterServer(runtime, core)
            addresses: dict[str, str] = json.loads(await asyncio.to_thread(server.start))
        process.announce(**addresses)
        process.readiness.clear("start")
        try:
            if isinstance(server, _core.RouterServer):
                await _follow_until_stopped(process, server)
            else:
                await process.stopping.wait()
            _log.info("draining", time_limit_seconds=settings.drain_seconds)
            await asyncio.to_thread(server.drain, int(settings.drain_seconds * 1000))
        finally:
            await asyncio.to_thread(server.stop)
    finally:
        await asyncio.to_thread(runtime.close)
        await asyncio.to_thread(_core.shutdown_telemetry)


def core_settings(settings: RouterSettings) -> dict[str, object]:
    """What the data plane is told."""
    core: dict[str, object] = {
        "name": settings.name,
        "http_listen": settings.http_listen,
        "grpc_listen": settings.grpc_listen,
        "admin_listen": settings.telemetry.admin_listen,
        "index_byte_budget_bytes": settings.index_byte_budget,
        "default_deadline_ms": int(settings.default_deadline_seconds * 1000),
        "first_token_timeout_ms": int(settings.first_token_timeout_seconds * 1000),
        "token_timeout_ms": int(settings.token_timeout_seconds * 1000),
        # At least one: 0 means something else.
        "body_timeout_ms": max(1, int(settings.body_timeout_seconds * 1000)),
        "cors_allowed_origins": list(settings.cors_allowed_origins),
        "write_timeout_ms": max(1, int(settings.write_timeout_seconds * 1000)),
        "startup_wait_ms": int(settings.startup_wait_seconds * 1000),
        "body_limit_bytes": settings.body_limit_bytes,
        "grpc_door": settings.core_door() | {"tls_client_optional": settings.tls_client_optional},
        "http_door": settings.core_http_door(),
        "text_threads": settings.text_threads,
        "remote_routers": list(settings.remote_routers),
        "routing": settings.routing,
        "admission": settings.admission or "allow_all",
        "upstreams": [
            {
                "name": upstream.name,
                "url": upstream.url,
                "models": upstream.models,
                "connect_timeout_ms": max(1, int(upstream.connect_timeout_seconds * 1000)),
            }
            | {
                name: str(path)
                for name in ("api_key_file", "tls_ca_file")
                if (path := getattr(upstream, name)) is not None
            }
            for upstream in settings.upstreams
        ],
    }
    tls = TlsFiles.of(settings.tls_ca_file, settings)
    if tls is not None:
        core["tls"] = tls.core_tls(settings.tls_role_uri)
    if settings.bus.urls:
        core["nats_url"] = ",".join(settings.bus.urls)
        core["kvmasters"] = list(settings.kvmasters)
        core |= {
            f"nats_{name}": str(path)
            for name in ("credentials_file", "tls_ca_file")
            if (path := getattr(settings.bus, name)) is not None
        }
    key_files = {"api_keys_file": settings.api_keys_file, "remote_api_key_file": settings.remote_api_key_file}
    core |= {name: str(file) for name, file in key_files.items() if file is not None}
    return core


class DataPlane(Protocol):
    """What takes cluster states; `_core.RouterServer` is one."""

    def apply_cluster_state(self, state: bytes) -> bool:
        """Applies a state; false when it is not newer than the present one, or is held back."""
        ...


class StateReceiver:
    """Gives cluster states to the data plane and keeps the last good one on disk."""

    def __init__(self, server: DataPlane, *, last_state_file: Path | None) -> None:
        self._server = server
        self._last_state_file = last_state_file
        self._applied = ClusterVersion()

    async def load(self) -> ClusterVersion | None:
        """Applies the last good state of an earlier run; returns its version."""
        if self._last_state_file is None:
            return None
        try:
            state = read_state(self._last_state_file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("last_state_unreadable", reason=str(error))
            return None
        if not await self._apply(state):
            return None
        _log.info("last_state_applied", revision=state.version.revision, workers=len(state.workers))
        return state.version

    async def take(self, state: ClusterState) -> None:
        """Applies a state; an older or invalid one is refused and the last good one stays."""
        if await self._apply(state) and self._last_state_file is not None:
            try:
                await asyncio.to_thread(write_state, self._last_state_file, state)
            except OSError as error:
                # A full disk costs the next start its head start, and this one nothing.
                _log.error("last_state_not_written", reason=str(error))

    async def _apply(self, state: ClusterState) -> bool:
        try:
            applied = await asyncio.to_thread(self._server.apply_cluster_state, state.SerializeToString())
        except (ValueError, _core.CoreError) as error:
            _log.error("cluster_state_refused", revision=state.version.revision, reason=str(error))
            return False
        if applied:
            self._applied = state.version
        elif state.version != self._applied:
            # A controller that lags, a store that was put back without `kvist store declare-restored`, or an empty one:
            # its state is held back by the data plane while workers answer that it does not know.
            _log.warning(
                "cluster_state_ignored",
                store_epoch=state.version.store_epoch,
                revision=state.version.revision,
                applied_store_epoch=self._applied.store_epoch,
                applied_revision=self._applied.revision,
            )
        return applied


async def _follow_until_stopped(process: Process[RouterSettings], server: "_core.RouterServer") -> None:
    settings = process.settings
    receiver = StateReceiver(server, last_state_file=settings.last_state_file)
    async with AsyncExitStack() as stack:
        if settings.cluster_state_file is not None:
            server.set_control_plane_connected(True)
            following = StaticState(settings.cluster_state_file).follow(receiver.take)
        else:
            # Imported here: who reads a file pays nothing for the library of gRPC. The core has one of its own.
            from kvist.cluster_watch import ClusterWatch  # noqa: PLC0415
            from kvist.grpc import Channels  # noqa: PLC0415

            tls = TlsFiles.of(settings.controller_tls_ca_file or settings.tls_ca_file, settings)
            channels = await stack.enter_async_context(Channels(settings.controllers, tls=tls))
            watch = ClusterWatch(
                subscriber=settings.name,
                on_state=receiver.take,
                on_connected=server.set_control_plane_connected,
                known_version=await receiver.load(),
            )
            following = watch.run(channels)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(following)
            await process.stopping.wait()
            task.cancel()
