"""Streaming requests at a steady rate, each with exactly one outcome."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import httpx2

TOKENS = 24
REQUEST_LIMIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended.

    Attributes:
        number: Of the request.
        attempts: How often it was sent.
        started: Monotonic seconds.
        ended: Monotonic seconds.
        kind: `finished` as its engine said, `refused` before the first event, `failed` with an error event, or `torn`:
            the stream broke off, or ended in a way that nobody may end it.
        detail: What the last answer said.
    """

    number: int
    attempts: int
    started: float
    ended: float
    kind: str
    detail: str = ""


@dataclass(slots=True)
class SteadyLoad:
    """Clients that go on until they are stopped.

    Attributes:
        addresses: `host:port` of the routers' HTTP edges; an attempt that is repeated goes to the next one.
        model: What is asked.
        clients: How many ask side by side.
        most_attempts: 2 for clients that try once more when they are told UNAVAILABLE before anything has come.
    """

    addresses: Callable[[], Sequence[str]]
    model: str
    clients: int = 4
    most_attempts: int = 1
    outcomes: list[Outcome] = field(default_factory=list)
    started: int = 0
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
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

    async def _ask(self, client: httpx2.AsyncClient) -> None:
        while not self._is_over:
            number = next(self._numbers)
            self.started += 1
            started = time.monotonic()
            for attempt in range(1, self.most_attempts + 1):
                addresses = self.addresses()
                kind, detail, may_repeat = await self._one(
                    client, addresses[(number + attempt) % len(addresses)], number
                )
                if not may_repeat:
                    break
            self.outcomes.append(Outcome(number, attempt, started, time.monotonic(), kind, detail))

    async def _one(self, client: httpx2.AsyncClient, address: str, number: int) -> tuple[str, str, bool]:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": f"Tell story {number} of the river."}],
            "max_tokens": TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        events: list[str] = []
        try:
            async with client.stream("POST", f"http://{address}/v1/chat/completions", json=body) as response:
                if response.status_code != httpx2.codes.OK:
                    text = (await response.aread()).decode(errors="replace")[:300]
                    return "refused", text, response.status_code == httpx2.codes.SERVICE_UNAVAILABLE
                events.extend([line[6:] async for line in response.aiter_lines() if line.startswith("data: ")])
        except httpx2.HTTPError as failure:
            return "torn", repr(failure), not events
        return (*judge(events), False)


def judge(events: Sequence[str]) -> tuple[str, str]:
    """The one outcome that a whole stream states, and what it says in the end."""
    if events.count("[DONE]") != 1 or events[-1] != "[DONE]":
        parsed = [json.loads(event) for event in events if event != "[DONE]"]
        errors = [event["error"] for event in parsed if "error" in event]
        if len(errors) == 1 and "[DONE]" not in events:
            return "failed", json.dumps(errors[0])[:300]
        return "torn", "no single end"
    parsed = [json.loads(event) for event in events[:-1]]
    reasons = [choice["finish_reason"] for event in parsed for choice in event.get("choices", ())]
    ends = [reason for reason in reasons if reason]
    usage = [event["usage"] for event in parsed if event.get("usage")]
    if ends != ["length"] or len(usage) != 1 or usage[0]["completion_tokens"] != TOKENS:
        return "torn", f"ends {ends}, usage {usage}"
    return "finished", ""
