"""A proxy of TCP connections that can swallow what goes through it, as a network that is cut does.

A connection that has lost bytes stays open and silent, and is closed when the network heals, for its stream has a hole.
Slow and narrow links are toxiproxy's (`toxiproxy.py`, which says what it cannot do).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Self

CHUNK_BYTES = 64 * 1024


class TcpProxy:
    """Looks like the server behind it.

    Args:
        upstream_port: Port of the server on loopback.
        swallows: Says of a connection, by the port it comes from, whether its bytes are lost at this moment.
    """

    def __init__(self, upstream_port: int, *, swallows: Callable[[int], bool] = lambda _port: False) -> None:
        self.upstream_port = upstream_port
        self.is_cut = False
        # Only what the server says is lost.
        self.loses_answers = False
        self._swallows = swallows
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], bool] = {}

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._end(list(self._connections))

    async def heal(self) -> None:
        """Lets everything through again, and closes connections that have lost something."""
        self.is_cut = self.loses_answers = False
        await self._end([task for task, has_hole in self._connections.items() if has_hole])

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = False
        try:
            await self._connect(reader, writer, task)
        except asyncio.CancelledError:
            # The server that made the task has nobody to tell.
            return
        finally:
            del self._connections[task]
            writer.close()

    async def _connect(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> None:
        source_port = writer.get_extra_info("peername")[1]

        def is_lost(*, is_answer: bool) -> bool:
            if self.is_cut or (is_answer and self.loses_answers) or self._swallows(source_port):
                self._connections[task] = True
                return True
            return False

        try:
            upstream = await asyncio.open_connection("127.0.0.1", self.upstream_port)
        except OSError:
            return
        directions = [
            asyncio.create_task(_carry(reader, upstream[1], partial(is_lost, is_answer=False))),
            asyncio.create_task(_carry(upstream[0], writer, partial(is_lost, is_answer=True))),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            if self._connections[task]:
                # A peer that hangs up behind a cut is not heard of either.
                await asyncio.Event().wait()
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            upstream[1].close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_lost: Callable[[], bool]) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(CHUNK_BYTES):
            if not is_lost():
                writer.write(data)
                await writer.drain()
