"""The client: a fixed number of connections, each of which asks again as soon as it was answered."""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

from perf.sse import BODY_END, Answer, WrongAnswerError, parse_answer

ANSWER_TIME_LIMIT_SECONDS = 60.0
# In the first event that shows text; the event before it states the role and is empty.
_TEXT = b'"content":"'
_NO_TEXT = b'"content":""'


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request.

    Attributes:
        began_at: When it was asked, on `time.perf_counter`.
        first_text_at: When the first text came.
        ended_at: When the end of the answer came.
        answer: What the answer held.
    """

    began_at: float
    first_text_at: float
    ended_at: float
    answer: Answer


def request_bytes(host: str, *, model: str, system: str, question: str, max_tokens: int) -> bytes:
    """A streamed chat completion as HTTP."""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.7,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\naccept: text/event-stream\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection(asyncio.Protocol):
    """One connection that is kept open. Parses nothing while an answer comes, so as not to be what is measured."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._first_at = 0.0
        self._answered: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Is ready to ask."""
        if isinstance(transport, asyncio.Transport):
            self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Collects the answer."""
        self._received += data
        if not self._first_at and self._received.count(_TEXT) > self._received.count(_NO_TEXT):
            self._first_at = time.perf_counter()
        is_error = self._received.startswith(b"HTTP/1.1 4") or self._received.startswith(b"HTTP/1.1 5")
        if (is_error or data.endswith(BODY_END) or self._received.endswith(BODY_END)) and self._answered is not None:
            answered, self._answered = self._answered, None
            answered.set_result(bytes(self._received))

    def connection_lost(self, _error: Exception | None) -> None:
        """Fails the answer that was awaited."""
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(WrongAnswerError("the connection was closed within an answer"))

    async def ask(self, request: bytes) -> tuple[float, float, float, bytes]:
        """When it began, when the first text came, when it ended, and the whole response."""
        if self._transport is None:
            raise WrongAnswerError("the connection is not open")
        self._received.clear()
        self._first_at = 0.0
        self._answered = asyncio.get_running_loop().create_future()
        began_at = time.perf_counter()
        self._transport.write(request)
        async with asyncio.timeout(ANSWER_TIME_LIMIT_SECONDS):
            response = await self._answered
        return began_at, self._first_at, time.perf_counter(), response

    def close(self) -> None:
        """Leaves."""
        if self._transport is not None:
            self._transport.close()


async def drive(address: str, requests: Iterator[bytes], *, concurrency: int) -> list[Sample]:
    """Asks all requests over so many connections at once and returns the samples, in the order of their ends.

    Raises:
        WrongAnswerError: An answer is wrong.
    """
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    connections: list[Connection] = []
    for _ in range(concurrency):
        _, connection = await loop.create_connection(Connection, host, int(port))
        connections.append(connection)
    answers: list[tuple[float, float, float, bytes]] = []

    async def keep_asking(connection: Connection) -> None:
        for request in requests:
            answers.append(await connection.ask(request))  # noqa: PERF401  All connections share the list.

    try:
        async with asyncio.TaskGroup() as group:
            for connection in connections:
                group.create_task(keep_asking(connection))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        for connection in connections:
            connection.close()
    # Afterwards, so that no connection waits while the answer of another is read.
    return [Sample(began, first, ended, parse_answer(response)) for began, first, ended, response in answers]
