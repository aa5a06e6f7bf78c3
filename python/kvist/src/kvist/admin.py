"""The admin HTTP server of a process: `/metrics`, `/livez`, `/readyz`.

It speaks just enough HTTP/1.1 for scrapers and probes: GET and HEAD, one answer for each connection, bounded reads.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import choose_encoder

from kvist import names
from kvist.readiness import Readiness
from kvist.settings import join_address, split_address

_READ_TIME_LIMIT_SECONDS = 5.0
_MAX_HEAD_BYTES = 16 * 1024


class AdminServer:
    """Serves `/metrics`, `/livez` and `/readyz` until closed."""

    def __init__(self, listen: str, *, registry: CollectorRegistry, readiness: Readiness) -> None:
        self._listen = listen
        self._registry = registry
        self._readiness = readiness
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        gauge = Gauge(names.READY, "Whether the process is ready.", registry=registry)
        gauge.set_function(lambda: float(readiness.is_ready))

    @property
    def address(self) -> str:
        """`host:port` it listens on."""
        if self._server is None:
            raise RuntimeError("the admin server was not started")
        host, port = self._server.sockets[0].getsockname()[:2]
        return join_address(host, port)

    async def __aenter__(self) -> Self:
        host, port = split_address(self._listen)
        self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_HEAD_BYTES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
            for connection in self._connections:
                connection.cancel()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        try:
            async with asyncio.timeout(_READ_TIME_LIMIT_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head.decode("latin-1")))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # The peer is slow, gone or wrong: the connection just ends.
            pass
        finally:
            writer.close()

    def _answer(self, head: str) -> bytes:
        request, *header_lines = head.split("\r\n")
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        headers = {
            name.strip().lower(): value.strip()
            for name, separator, value in (line.partition(":") for line in header_lines)
            if separator
        }
        content_type = "text/plain; charset=utf-8"
        if method not in {"GET", "HEAD"}:
            status, body = HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD\n"
        elif path == "/livez":
            status, body = HTTPStatus.OK, b"ok\n"
        elif path == "/readyz":
            reasons = self._readiness.reasons
            status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
            body = ("".join(f"{name}: {reason}\n" for name, reason in sorted(reasons.items())) or "ok\n").encode()
        elif path == "/metrics":
            encode, content_type = choose_encoder(headers.get("accept", ""))
            status, body = HTTPStatus.OK, encode(self._registry)
        else:
            status, body = HTTPStatus.NOT_FOUND, b"/metrics, /livez or /readyz\n"
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"content-type: {content_type}",
            f"content-length: {len(body)}",
            "connection: close",
        )
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if method == "HEAD" else body)
