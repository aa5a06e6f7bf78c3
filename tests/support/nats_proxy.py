"""A proxy that understands NATS's client protocol and loses, repeats, delays and changes single messages.

It knows where each message begins and ends, so the connection stays whole whatever happens to a message. A delayed
message overtakes nothing and is overtaken by what comes after it: that is how order is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

LONGEST_LINE_BYTES = 4 * 1024 * 1024
WITH_PAYLOAD = {b"PUB", b"MSG", b"HPUB", b"HMSG"}
WITH_HEADERS = {b"HPUB", b"HMSG"}


@dataclass(frozen=True, slots=True)
class Message:
    """A message on its way.

    Attributes:
        words: Its first line without the sizes: verb, subject, and what else there is.
        headers: Its headers as they are; empty for none.
        payload: Its payload.
    """

    words: tuple[bytes, ...]
    headers: bytes
    payload: bytes

    @property
    def subject(self) -> str:
        return self.words[1].decode()

    def encode(self) -> bytes:
        sizes = [len(self.headers) + len(self.payload)]
        if self.words[0] in WITH_HEADERS:
            sizes.insert(0, len(self.headers))
        line = b" ".join([*self.words, *(str(size).encode() for size in sizes)])
        return b"".join((line, b"\r\n", self.headers, self.payload, b"\r\n"))


async def read_frame(reader: asyncio.StreamReader) -> Message | bytes:
    """The next message, or a line without one: INFO, CONNECT, SUB, PING, +OK and so on."""
    line = await reader.readuntil(b"\r\n")
    words = line.split()
    if not words or words[0].upper() not in WITH_PAYLOAD:
        return line
    verb = words[0].upper()
    total = int(words[-1])
    headers_size = int(words[-2]) if verb in WITH_HEADERS else 0
    body = await reader.readexactly(total + 2)
    named = tuple(words[: -2 if verb in WITH_HEADERS else -1])
    return Message((verb, *named[1:]), body[:headers_size], body[headers_size:total])


@dataclass(slots=True)
class Mischief:
    """What happens to messages by chance.

    Attributes:
        seed: Of the random numbers.
        lose: Share of messages that are lost.
        repeat: Share that come twice.
        delay: Share that come late.
        longest_delay_seconds: How late at most.
        is_on: Whether anything happens.
        done: What has happened, by its name.
    """

    seed: int
    lose: float = 0.0
    repeat: float = 0.0
    delay: float = 0.0
    longest_delay_seconds: float = 0.4
    is_on: bool = True
    done: Counter[str] = field(default_factory=Counter)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def delays(self) -> list[float]:
        """How late each copy of a message comes; empty when it is lost."""
        if not self.is_on:
            return [0.0]
        chance = self._random.random()
        for name, share in (("lost", self.lose), ("repeated", self.repeat), ("delayed", self.delay)):
            if chance < share:
                self.done[name] += 1
                late = self._random.uniform(0.01, self.longest_delay_seconds)
                return {"lost": [], "repeated": [0.0, late], "delayed": [late]}[name]
            chance -= share
        return [0.0]


class NatsProxy:
    """A server that looks like the one behind it.

    `change` sees each message and gives what goes on in its place; none loses it.
    """

    def __init__(self, upstream_port: int, *, mischief: Mischief | None = None) -> None:
        self.change: Callable[[Message], Message | None] | None = None
        self.messages = 0
        self._upstream_port = upstream_port
        self._mischief = mischief
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._connect(reader, writer)
        except asyncio.CancelledError:
            # The end of the proxy; the server that made the task has nobody to tell.
            return
        finally:
            self._connections.discard(task)
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port, limit=LONGEST_LINE_BYTES)
        except OSError:
            return
        directions = {
            asyncio.create_task(self._carry(reader, upstream[1])),
            asyncio.create_task(self._carry(upstream[0], writer)),
        }
        try:
            # One side that is gone is the end of both.
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            upstream[1].close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        late: set[asyncio.TimerHandle] = set()
        loop = asyncio.get_running_loop()

        def write(data: bytes) -> None:
            if not writer.is_closing():
                writer.write(data)

        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    frame = await read_frame(reader)
                    if isinstance(frame, bytes):
                        write(frame)
                    else:
                        for delay, data in self._copies(frame):
                            if delay:
                                late.add(loop.call_later(delay, write, data))
                            else:
                                write(data)
                    late = {handle for handle in late if handle.when() > loop.time()}
                    await writer.drain()
        finally:
            for handle in late:
                handle.cancel()

    def _copies(self, message: Message) -> list[tuple[float, bytes]]:
        self.messages += 1
        changed = message if self.change is None else self.change(message)
        if changed is None:
            return []
        delays = [0.0] if self._mischief is None else self._mischief.delays()
        return [(delay, changed.encode()) for delay in delays]
