"""Clients that send token ids and count what comes back: over Kvist's `Connect`, and over a vLLM server's HTTP."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvist.engine.v1 import engine_pb2, engine_pb2_grpc
from kvist.grpc import open_channel
from perf.sse import WrongAnswerError

ANSWER_LIMIT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Received:
    """What a batch of requests brought.

    Attributes:
        tokens: Of all requests.
        messages: Frames, or events, that they came in.
    """

    tokens: int
    messages: int


class TokenClient(Protocol):
    """One way to ask an engine."""

    async def batch(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> Received:
        """Asks for all prompts at once and waits for the last answer.

        Raises:
            WrongAnswerError: One was not answered as it should be.
        """


class ConnectClient:
    """A router's end of `Connect`."""

    def __init__(self, stub: "engine_pb2_grpc.EngineServiceAsyncStub", name: str) -> None:
        self._name = name
        self._last_stream = 0
        self._sending: asyncio.Queue[engine_pb2.ConnectRequest] = asyncio.Queue()
        hello = engine_pb2.Hello(router_name=name, session=1)
        self._send(engine_pb2.RouterMessage(hello=hello))
        self._call = stub.Connect(self._messages())

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, address: str, name: str) -> AsyncIterator["ConnectClient"]:
        """A client that is welcome."""
        async with open_channel(address, retries=False) as channel:
            client = cls(engine_pb2_grpc.EngineServiceStub(channel), name)
            await client._call.read()
            yield client
            client._call.cancel()

    async def batch(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> Received:
        """All requests in one frame, as a router sends what is at hand."""
        open_streams = set()
        messages = []
        for prompt in prompts:
            self._last_stream += 1
            open_streams.add(self._last_stream)
            request = engine_pb2.EngineRequest(
                request_id=f"{self._name}-{self._last_stream}",
                tokens=engine_pb2.TokenIds(ids=prompt),
                sampling=engine_pb2.SamplingParameters(temperature=0),
                stop=engine_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
            )
            start = engine_pb2.StartRequest(stream_id=self._last_stream, request=request)
            messages.append(engine_pb2.RouterMessage(start=start))
        self._send(*messages)
        tokens = frames = 0
        while open_streams:
            response = await asyncio.wait_for(self._call.read(), ANSWER_LIMIT_SECONDS)
            if not isinstance(response, engine_pb2.ConnectResponse):
                raise WrongAnswerError("the worker ended the stream")
            frames += bool(response.events)
            for event in response.events:
                if event.HasField("delta"):
                    tokens += len(event.delta.token_ids)
                elif event.HasField("failed"):
                    raise WrongAnswerError(event.failed.message)
                else:
                    open_streams.discard(event.stream_id)
        return Received(tokens, frames)

    def _send(self, *messages: engine_pb2.RouterMessage) -> None:
        self._sending.put_nowait(engine_pb2.ConnectRequest(messages=messages))

    async def _messages(self) -> AsyncIterator[engine_pb2.ConnectRequest]:
        while True:
            yield await self._sending.get()


class HttpClient:
    """Streams of a vLLM server, one connection for each request."""

    def __init__(self, port: int, path: str) -> None:
        self._port = port
        self._path = path

    async def batch(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> Received:
        """All requests at once."""
        answers = await asyncio.wait_for(
            asyncio.gather(*(self._answer(prompt, max_tokens) for prompt in prompts)), ANSWER_LIMIT_SECONDS
        )
        return Received(sum(answer.tokens for answer in answers), sum(answer.messages for answer in answers))

    async def _answer(self, prompt: Sequence[int], max_tokens: int) -> Received:
        words: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body: dict[str, Any] = {"model": "front", "stream": True}
        if self._path == "/v1/completions":
            body |= {"prompt": list(prompt), "return_token_ids": True, **words}
        else:
            body |= {"token_ids": list(prompt), "sampling_params": words | {"detokenize": False}}
        encoded = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            head = (
                f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Connection: close\r\nContent-Length: {len(encoded)}\r\n\r\n"
            )
            writer.write(head.encode() + encoded)
            status = await reader.readline()
            if b" 200 " not in status:
                raise WrongAnswerError((status + await reader.read(500)).decode(errors="replace"))
            tokens = events = 0
            while line := await reader.readline():
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                got = sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))
                tokens += got
                events += bool(got)
            return Received(tokens, events)
        finally:
            writer.close()
