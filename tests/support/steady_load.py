"""Streaming requests at a steady rate, each with exactly one outcome."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

TOKENS = 24
REQUEST_LIMIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a client was told when it sent a request once.

    Attributes:
        request_id: The client's own, which its router puts its name before.
        kind: `finished` as its engine said, `refused` before the first event, `failed` with an error event, or `torn`:
            the stream broke off, or ended in a way that nobody may end it.
        detail: What the answer said.
        ends: Finish reasons that the stream stated, however it went on.
        text_at: Monotonic seconds of the first piece of text; none when there was none.
    """

    request_id: str
    kind: str
    detail: str = ""
    ends: tuple[str, ...] = ()
    text_at: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended.

    Attributes:
        number: Of the request.
        started: Monotonic seconds.
        ended: Monotonic seconds.
        attempts: Each time it was sent; the last one is what the client was left with.
    """

    number: int
    started: float
    ended: float
    attempts: tuple[Attempt, ...]

    @property
    def kind(self) -> str:
        return self.attempts[-1].kind


@dataclass(slots=True)
class SteadyLoad:
    """Clients that go on until they are stopped.

    Attributes:
        addresses: `host:port` of the routers' HTTP edges; an attempt that is repeated goes to the next one.
        model: What is asked.
        clients: How many ask side by side.
        most_attempts: 2 for clients that try once more when they are told UNAVAILABLE or their connection breaks. They
            throw away what had come.
        outcomes: Of all requests, in the order of their ends.
        running_attempts: Ids of the attempts that run, each with whether a piece of text has come.
        started: How many requests were begun.
    """

    addresses: Callable[[], Sequence[str]]
    model: str
    clients: int = 4
    most_attempts: int = 1
    outcomes: list[Outcome] = field(default_factory=list)
    running_attempts: dict[str, bool] = field(default_factory=dict)
    started: int = 0
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    prefix: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    _is_over: bool = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[SteadyLoad]:
        """Load for the length of the block; each request that was begun has its outcome afterwards."""
        self._is_over = False
        async with httpx2.AsyncClient(timeout=REQUEST_LIMIT_SECONDS, trust_env=False) as client:
            tasks = [asyncio.create_task(self._ask(client)) for _ in range(self.clients)]
            try:
                yield self
            finally:
                self._is_over = True
                await asyncio.gather(*tasks)
        assert self.started == len(self.outcomes)
        assert len({outcome.number for outcome in self.outcomes}) == len(self.outcomes)

    def kinds(self, *, since: int = 0) -> Counter[str]:
        """How many ended how, from the given one on."""
        return Counter(outcome.kind for outcome in self.outcomes[since:])

    def bad(self, *, since: int = 0) -> list[Outcome]:
        """Those that did not finish."""
        return [outcome for outcome in self.outcomes[since:] if outcome.kind != "finished"]

    async def until_finished(self, count: int, *, limit_seconds: float) -> None:
        """Waits until so many more requests have finished."""
        wanted = self.kinds()["finished"] + count
        async with asyncio.timeout(limit_seconds):
            while self.kinds()["finished"] < wanted:
                await asyncio.sleep(0.02)

    async def _ask(self, client: httpx2.AsyncClient) -> None:
        while not self._is_over:
            number = next(self._numbers)
            self.started += 1
            started = time.monotonic()
            attempts: list[Attempt] = []
            while True:
                addresses = self.addresses()
                request_id = f"{self.prefix}-{number}-{len(attempts)}"
                address = addresses[(number + len(attempts)) % len(addresses)]
                self.running_attempts[request_id] = False
                attempt, may_repeat = await self._one(client, address, number, request_id)
                del self.running_attempts[request_id]
                attempts.append(attempt)
                if not may_repeat or len(attempts) == self.most_attempts:
                    break
            self.outcomes.append(Outcome(number, started, time.monotonic(), tuple(attempts)))

    async def _one(
        self, client: httpx2.AsyncClient, address: str, number: int, request_id: str
    ) -> tuple[Attempt, bool]:
        """What became of one attempt, and whether a client may send the request again after it."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": f"Tell story {number} of the river {self.prefix}."}],
            "max_tokens": TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        events: list[str] = []
        text_at: float | None = None
        try:
            async with client.stream(
                "POST", f"http://{address}/v1/chat/completions", json=body, headers={"x-request-id": request_id}
            ) as response:
                if response.status_code != httpx2.codes.OK:
                    text = (await response.aread()).decode(errors="replace")[:300]
                    is_unavailable = response.status_code == httpx2.codes.SERVICE_UNAVAILABLE
                    return Attempt(request_id, "refused", text), is_unavailable
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        events.append(line[6:])
                        if text_at is None and _has_text(events[-1]):
                            text_at = time.monotonic()
                            self.running_attempts[request_id] = True
        except httpx2.HTTPError as failure:
            kind, detail, may_repeat = "torn", repr(failure), True
        else:
            kind, detail = judge(events)
            may_repeat = False
        return Attempt(request_id, kind, detail, stated_ends(events), text_at), may_repeat


def _chunks(events: Sequence[str]) -> list[dict[str, Any]]:
    return [json.loads(event) for event in events if event != "[DONE]"]


def _has_text(event: str) -> bool:
    return any(choice["delta"].get("content") for chunk in _chunks([event]) for choice in chunk.get("choices", ()))


def stated_ends(events: Sequence[str]) -> tuple[str, ...]:
    """The finish reasons of a stream."""
    choices = [choice for chunk in _chunks(events) for choice in chunk.get("choices", ())]
    return tuple(choice["finish_reason"] for choice in choices if choice["finish_reason"])


def judge(events: Sequence[str]) -> tuple[str, str]:
    """The one outcome that a whole stream states, and what it says in the end."""
    if events.count("[DONE]") != 1 or events[-1] != "[DONE]":
        errors = [chunk["error"] for chunk in _chunks(events) if "error" in chunk]
        if len(errors) == 1 and "[DONE]" not in events:
            return "failed", json.dumps(errors[0])[:300]
        return "torn", "no single end"
    ends = stated_ends(events)
    usage = [chunk["usage"] for chunk in _chunks(events) if chunk.get("usage")]
    if ends != ("length",) or len(usage) != 1 or usage[0]["completion_tokens"] != TOKENS:
        return "torn", f"ends {ends}, usage {usage}"
    return "finished", ""
