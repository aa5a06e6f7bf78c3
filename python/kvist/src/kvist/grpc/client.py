"""Channels to Kvist's gRPC servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from types import TracebackType
from typing import Self, overload

import grpc

from kvist.grpc.interceptors import TraceStreamStream, TraceStreamUnary, TraceUnaryStream, TraceUnaryUnary
from kvist.tls_files import TlsFiles

DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# On a busy machine a handshake takes longer than a connection in plain text.
_HANDSHAKE_TIME_LIMIT_MS = 3_000
# Only UNAVAILABLE is tried again, and no stream after its first message.
_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
        "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
    }
)


def open_channel(
    address: str,
    *,
    tls: TlsFiles | None = None,
    retries: bool = True,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """Opens a channel; it connects at the first call and reconnects by itself.

    Args:
        address: `host:port`, or a target such as `dns:///routers:7000`.
        tls: Plain text when absent.
        retries: Try a call again that ended with UNAVAILABLE. Off for calls that may run once only.
        max_message_bytes: Largest message taken or sent.
    """
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also the time that one attempt may take, the handshake included.
        ("grpc.min_reconnect_backoff_ms", 100 if tls is None else _HANDSHAKE_TIME_LIMIT_MS),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Every channel has connections of its own: a cut of one tells nothing about another.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", int(retries)),
    ]
    if retries:
        options.append(("grpc.service_config", _SERVICE_CONFIG))
    interceptors = [TraceUnaryUnary(), TraceUnaryStream(), TraceStreamUnary(), TraceStreamStream()]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    credentials = grpc.ssl_channel_credentials(*tls.credentials())
    return grpc.aio.secure_channel(address, credentials, options=options, interceptors=interceptors)


class Channels(Sequence[grpc.aio.Channel]):
    """Channels to servers of one kind, for a process's whole life: each is opened anew when a TLS file has changed.

    A channel keeps the certificates that it was opened with. Whoever takes one from here for each stream follows the
    files; a stream that runs is not touched.
    """

    def __init__(self, addresses: Sequence[str], *, tls: TlsFiles | None) -> None:
        self._addresses = tuple(addresses)
        self._tls = tls
        self._open: dict[str, tuple[object, grpc.aio.Channel]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        # A wrong file should be known at the start.
        if self._tls is not None:
            self._tls.credentials()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for _, channel in self._open.values():
            await channel.close()
        await asyncio.gather(*self._closing)

    def __len__(self) -> int:
        return len(self._addresses)

    @overload
    def __getitem__(self, position: int) -> grpc.aio.Channel: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[grpc.aio.Channel]: ...
    def __getitem__(self, position: int | slice) -> grpc.aio.Channel | Sequence[grpc.aio.Channel]:
        if isinstance(position, slice):
            return [self._channel(address) for address in self._addresses[position]]
        return self._channel(self._addresses[position])

    def _channel(self, address: str) -> grpc.aio.Channel:
        known = self._open.get(address)
        try:
            files = None if self._tls is None else self._tls.credentials()
        except OSError:
            # A file that is being replaced: the channel there is does until the next time.
            if known is not None:
                return known[1]
            raise
        if known is not None:
            if known[0] == files:
                return known[1]
            closing = asyncio.create_task(known[1].close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        channel = open_channel(address, tls=self._tls, retries=False)
        self._open[address] = (files, channel)
        return channel
