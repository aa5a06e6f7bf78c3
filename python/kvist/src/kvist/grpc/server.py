"""The gRPC server of a Python process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, Gauge

from kvist import _core, names, telemetry
from kvist.errors import core_errors
from kvist.grpc.interceptors import ServerCalls
from kvist.grpc.limits import CallLimits
from kvist.settings import ListenSettings, is_loopback, join_address, split_address

# Clients ping every 30 s (see `client`); more often than this is refused.
_LEAST_PING_INTERVAL_MS = 10_000
_CLOSE_GRACE_SECONDS = 1.0
# How many times the room of one method a connection may have open; further calls wait at its client.
CALLS_OF_A_CONNECTION = 2
# Whoever connects and then says nothing is shown out after this time.
_HANDSHAKE_TIME_LIMIT_MS = 5_000


@dataclass(frozen=True, slots=True)
class Registration:
    """One service of a server.

    Attributes:
        name: Fully qualified name, such as `kvist.controller.v1.ControllerService`.
        add: Adds the servicer to a server, for example a `functools.partial` of the generated function.
        unpaced: Methods that a host may call as often as it likes.
    """

    name: str
    add: Callable[[grpc.aio.Server], None]
    unpaced: tuple[str, ...] = ()


class GrpcServer:
    """A server with health, reflection, rich errors and limits.

    It reports NOT_SERVING until `set_serving(True)`. On leaving, NOT_SERVING comes first, then running calls get a
    short grace.
    """

    def __init__(
        self, settings: ListenSettings, *, services: Sequence[Registration], registry: CollectorRegistry
    ) -> None:
        self._settings = settings
        self._names = tuple(service.name for service in services)
        self._health: Any = getattr(health, "aio").HealthServicer()  # noqa: B009  Its types do not export it.
        self._server = grpc.aio.server(
            interceptors=[ServerCalls(registry, rules=_rules(settings), limits=_limits(settings, services))],
            options=[
                ("grpc.max_receive_message_length", settings.max_message_bytes),
                ("grpc.max_send_message_length", settings.max_message_bytes),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", _LEAST_PING_INTERVAL_MS),
                ("grpc.so_reuseport", 0),
                ("grpc.max_concurrent_streams", CALLS_OF_A_CONNECTION * settings.max_calls_at_once),
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIME_LIMIT_MS),
            ],
        )
        if settings.tls_certificate_file is not None:
            _measure_certificate(settings.tls_certificate_file, registry)
        for service in services:
            service.add(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if settings.reflection:
            visible = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(visible, self._server)
        self._address = ""

    @property
    def address(self) -> str:
        """`host:port` it listens on."""
        if not self._address:
            raise RuntimeError("the gRPC server was not started")
        return self._address

    async def __aenter__(self) -> Self:
        host, _ = split_address(self._settings.listen)
        credentials = _credentials(self._settings)
        try:
            if credentials is None:
                if not is_loopback(host):
                    telemetry.logger("kvist.grpc").warning("plain_text_off_loopback", address=self._settings.listen)
                port = self._server.add_insecure_port(self._settings.listen)
            else:
                port = self._server.add_secure_port(self._settings.listen, credentials)
        except RuntimeError as failure:
            raise OSError(f"cannot listen on {self._settings.listen}") from failure
        self._address = join_address(host, port)
        await self._health.set("liveness", health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(False)
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop(grace_seconds=_CLOSE_GRACE_SECONDS)

    async def set_serving(self, is_serving: bool) -> None:
        """States for all services whether they take calls."""
        state = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", "readiness", *self._names):
            await self._health.set(name, state)

    async def stop(self, *, grace_seconds: float) -> None:
        """Turns NOT_SERVING for good, refuses new calls, and ends running ones after the grace. Idempotent."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_seconds)


def _rules(settings: ListenSettings) -> _core.DoorRules | None:
    """The table of who may call what; none where nobody is asked for a certificate."""
    if settings.tls_client_ca_file is None:
        return None
    with core_errors():
        return _core.DoorRules(list(settings.open_services), settings.tls_role_uri)


def _limits(settings: ListenSettings, services: Sequence[Registration]) -> CallLimits:
    return CallLimits(
        most_at_once=settings.max_calls_at_once,
        most_per_second=settings.max_calls_per_second,
        unpaced={f"{service.name}/{method}" for service in services for method in service.unpaced},
    )


def _measure_certificate(file: Path, registry: CollectorRegistry) -> None:
    """States when the certificate that new connections see ends; 0 while its file cannot be read."""

    def expiry() -> float:
        try:
            return float(_core.certificate_expiry(str(file)))
        except _core.CoreError:
            return 0.0

    text = "When the certificate of a listener ends, in Unix seconds."
    gauge = Gauge(names.TLS_CERTIFICATE_EXPIRY, text, ["listener"], registry=registry)
    gauge.labels("grpc").set_function(expiry)


def _credentials(settings: ListenSettings) -> grpc.ServerCredentials | None:
    certificate_file, key_file, ca_file = (
        settings.tls_certificate_file,
        settings.tls_key_file,
        settings.tls_client_ca_file,
    )
    if certificate_file is None or key_file is None:
        return None

    # Read again for each new connection, so that a renewed certificate needs no restart.
    def fetch() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(key_file.read_bytes(), certificate_file.read_bytes())],
            root_certificates=ca_file.read_bytes() if ca_file else None,
        )

    dynamic: Any = grpc.dynamic_ssl_server_credentials
    credentials: grpc.ServerCredentials = dynamic(fetch(), fetch, require_client_authentication=ca_file is not None)
    return credentials
