"""What Python says and hears on NATS: tombstones, decision samples, audits. Nothing else imports the NATS client.

The bus is never the record. Sending never waits for a server: while none is connected, messages are dropped and
counted, except tombstones, of which the last of each worker is sent again after each reconnect, and once more when
listeners that reconnect more slowly must be back.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import nats
from google.protobuf.message import Message
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from prometheus_client import CollectorRegistry, Counter, Gauge

from kvist import _core, names, telemetry
from kvist.errors import invalid_field
from kvist.events.v1 import events_pb2
from kvist.settings import BusSettings

_SUBJECT_PREFIX = "kvist.v1"
_TOKEN = re.compile(r"[A-Za-z0-9_-]+")
_RECONNECT_SECONDS = 0.25
_CONNECT_TIME_LIMIT_SECONDS = 2
# After a connection is made; the last is longer than any listener waits between two attempts.
_REPEAT_AFTER_SECONDS = (0.0, 0.5, 3.0)
_KEPT_TOMBSTONES = 1_024
_FLUSH_TIME_LIMIT_SECONDS = 1
_DRAIN_TIME_LIMIT_SECONDS = 2.0
_MAX_MESSAGE_BYTES = 512 * 1024
_LOG = telemetry.logger("kvist.bus")


def subject(cluster: str, *tokens: str) -> str:
    """The subject of a cluster below `kvist.v1`.

    Raises:
        ValueError: A token holds what a subject may not.
    """
    for token in (cluster, *tokens):
        if not _TOKEN.fullmatch(token):
            raise ValueError(f"{token!r} is no token of a subject: letters, digits, '-' and '_' only")
    return ".".join((_SUBJECT_PREFIX, cluster, *tokens))


def check_files(settings: BusSettings) -> None:
    """Sees to it that the files of the settings can be used: a process should say so at its start, not at a connection.

    Raises:
        InvalidRequestError: Which setting is wrong, and why.
    """
    if not settings.urls:
        return
    if settings.credentials_file is not None:
        _credentials(settings.credentials_file)
    if settings.tls_ca_file is not None:
        _tls(settings.tls_ca_file)


def _credentials(file: Path) -> _core.NatsCredentials:
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as failure:
        raise invalid_field("bus.credentials_file", f"cannot be read: {_reason(failure)}") from failure
    try:
        return _core.NatsCredentials(text)
    except _core.CoreError as failure:
        raise invalid_field("bus.credentials_file", "holds no NATS credentials") from failure


def _tls(ca_file: Path) -> ssl.SSLContext:
    try:
        pem = ca_file.read_text()
    except (OSError, UnicodeDecodeError) as failure:
        raise invalid_field("bus.tls_ca_file", f"cannot be read: {_reason(failure)}") from failure
    try:
        return ssl.create_default_context(cadata=pem)
    except (ssl.SSLError, ValueError) as failure:
        raise invalid_field("bus.tls_ca_file", "holds no certificate as PEM") from failure


def _reason(failure: Exception) -> str:
    return (failure.strerror if isinstance(failure, OSError) else None) or "it is no text"


class _TlsClient(Client):
    """A client that says nothing to a server without TLS; the library's own goes on in plain text."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and not info.get("tls_required", False):
            raise NatsError("the server offers no TLS")
        await super()._process_info(info, initial_connection)


class Bus:
    """A connection to NATS that comes and goes without its users noticing."""

    def __init__(self, settings: BusSettings, *, cluster: str, client_name: str, registry: CollectorRegistry) -> None:
        subject(cluster)
        self._settings = settings
        self._cluster = cluster
        self._client_name = client_name
        # None until the first connection: the client cannot be closed or flushed before.
        self._client: Client | None = None
        self._connector: asyncio.Task[None] | None = None
        self._tombstones: dict[str, events_pb2.Tombstone] = {}
        self._subscriptions: dict[str, Callable[[Msg], Awaitable[None]]] = {}
        self._connected = asyncio.Event()
        self._is_new_connection = asyncio.Event()
        gauge = Gauge(names.BUS_CONNECTED, "Whether NATS is connected.", registry=registry)
        gauge.set_function(lambda: float(self.is_connected))
        self._published = Counter(names.BUS_PUBLISHED, "Messages given to NATS.", registry=registry)
        self._dropped = Counter(names.BUS_DROPPED, "Messages dropped.", ["reason"], registry=registry)
        self._reconnects = Counter(names.BUS_RECONNECTS, "Connections after the first.", registry=registry)
        for reason in ("disconnected", "too_large", "slow_consumer"):
            self._dropped.labels(reason)

    @property
    def is_connected(self) -> bool:
        """Whether a server is connected at this moment."""
        return self._client is not None and bool(self._client.is_connected)

    async def wait_connected(self) -> None:
        """Waits for the first connection."""
        await self._connected.wait()

    async def __aenter__(self) -> Self:
        if self._settings.urls:
            self._connector = asyncio.create_task(self._run(), name="kvist-bus")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._connector is not None:
            self._connector.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connector
        client = self._client
        if client is None:
            return
        with contextlib.suppress(NatsError, TimeoutError, OSError):
            if client.is_connected:
                async with asyncio.timeout(_DRAIN_TIME_LIMIT_SECONDS):
                    await client.drain()
        with contextlib.suppress(NatsError, TimeoutError, OSError):
            await client.close()

    async def publish_tombstone(self, tombstone: events_pb2.Tombstone) -> None:
        """Announces a death, now and after each reconnect."""
        self._tombstones.pop(tombstone.worker_uid, None)
        self._tombstones[tombstone.worker_uid] = tombstone
        if len(self._tombstones) > _KEPT_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]
        await self._publish(subject(self._cluster, "tombstone", tombstone.worker_uid), tombstone)
        with contextlib.suppress(NatsError, TimeoutError, OSError):
            await self.flush()

    async def publish_decision(self, decision: events_pb2.DecisionRecord) -> None:
        """Says a sampled decision."""
        await self._publish(subject(self._cluster, "decision"), decision)

    async def subscribe(self, *tokens: str, on_message: Callable[[str, bytes], Awaitable[None]]) -> None:
        """Hears a subject of the cluster; wildcards `*` and `>` may be tokens. Holds over reconnects."""
        plain = [token for token in tokens if token not in {"*", ">"}]
        subject(self._cluster, *plain)
        name = ".".join((_SUBJECT_PREFIX, self._cluster, *tokens))

        async def forward(message: Msg) -> None:
            await on_message(message.subject, message.data)

        self._subscriptions[name] = forward
        if self._client is not None:
            await self._client.subscribe(name, cb=forward)

    async def flush(self) -> None:
        """Waits until the server has taken all that was said and all subscriptions, if one is connected."""
        if self._client is not None and self._client.is_connected:
            await self._client.flush(timeout=_FLUSH_TIME_LIMIT_SECONDS)

    async def _publish(self, name: str, message: Message) -> None:
        client = self._client
        if client is None or not client.is_connected:
            self._dropped.labels("disconnected").inc()
            return
        payload = message.SerializeToString()
        if len(payload) > _MAX_MESSAGE_BYTES:
            self._dropped.labels("too_large").inc()
            return
        try:
            await client.publish(name, payload)
            self._published.inc()
        except (NatsError, OSError):
            self._dropped.labels("disconnected").inc()

    async def _run(self) -> None:
        await self._connect()
        self._is_new_connection.set()
        await self._repeat_tombstones()

    async def _connect(self) -> None:
        """Connects for the first time; from then on the client reconnects by itself."""
        proof: dict[str, Any] = {}
        if self._settings.tls_ca_file is not None:
            proof["tls"] = _tls(self._settings.tls_ca_file)
        if self._settings.credentials_file is not None:
            credentials = _credentials(self._settings.credentials_file)
            # The client's own reading of such files needs a package that is not here.
            proof["user_jwt_cb"] = credentials.jwt.encode
            proof["signature_cb"] = lambda nonce: base64.b64encode(credentials.sign(nonce.encode()))
        while True:
            client = Client() if self._settings.tls_ca_file is None else _TlsClient()
            try:
                # A whole first attempt is made anew each time: the client's own loop would hide why it fails.
                await client.connect(
                    servers=list(self._settings.urls),
                    name=self._client_name,
                    **proof,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RECONNECT_SECONDS,  # type: ignore[arg-type]  # A fraction works.
                    connect_timeout=_CONNECT_TIME_LIMIT_SECONDS,
                    ping_interval=5,
                    max_outstanding_pings=2,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                )
            except (NatsError, OSError, TimeoutError) as failure:
                _LOG.warning("bus_connect_failed", reason=str(failure) or type(failure).__name__)
                await asyncio.sleep(_RECONNECT_SECONDS)
                continue
            break
        # In one step: what is subscribed from here on goes to the client by itself.
        known, self._client = list(self._subscriptions.items()), client
        for name, forward in known:
            await client.subscribe(name, cb=forward)
        self._connected.set()
        _LOG.info("bus_connected")

    async def _repeat_tombstones(self) -> None:
        """Says all tombstones anew whenever a connection was made, until cancelled."""
        while True:
            await self._is_new_connection.wait()
            self._is_new_connection.clear()
            for pause_seconds in _REPEAT_AFTER_SECONDS:
                await asyncio.sleep(pause_seconds)
                for tombstone in list(self._tombstones.values()):
                    await self._publish(subject(self._cluster, "tombstone", tombstone.worker_uid), tombstone)

    async def _on_error(self, failure: Exception) -> None:
        if isinstance(failure, nats.errors.SlowConsumerError):
            self._dropped.labels("slow_consumer").inc()
        _LOG.debug("bus_error", reason=str(failure) or type(failure).__name__)

    async def _on_disconnected(self) -> None:
        _LOG.warning("bus_disconnected")

    async def _on_reconnected(self) -> None:
        self._reconnects.inc()
        self._is_new_connection.set()
        _LOG.info("bus_reconnected")
