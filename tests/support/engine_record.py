"""What simulated engines wrote down of their requests, and how it is held against what clients were told.

Each start of an engine writes a file of its own (`recordFolder`): a line when it takes a request, and one at its end,
before anybody hears of it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.steady_load import TOKENS, Outcome


@dataclass(slots=True)
class EngineRequest:
    """One request at one start of an engine.

    Attributes:
        request_id: The client's id, without the name of the router that stands before it.
        engine: `<worker uid>.<incarnation>`.
        reason: How it ended; none while it runs, and for ever where the engine was killed.
        completion_tokens: Tokens that were generated until then.
    """

    request_id: str
    engine: str
    reason: str | None = None
    completion_tokens: int = 0


def read_engine_records(folder: Path, *, routers: Collection[str]) -> list[EngineRequest]:
    """All requests of all starts of all engines. Each was taken once by one start, and ended there at most once."""
    requests: list[EngineRequest] = []
    for file in sorted(folder.glob("*.jsonl")):
        of_engine: dict[str, EngineRequest] = {}
        for line in map(json.loads, file.read_text().splitlines()):
            request_id = line["request_id"]
            if line["event"] == "accepted":
                assert request_id not in of_engine, f"{file.name} took {request_id} twice"
                of_engine[request_id] = EngineRequest(_of_client(request_id, routers), file.stem)
            else:
                request = of_engine[request_id]
                assert request.reason is None, f"{file.name} ended {request_id} twice"
                request.reason, request.completion_tokens = line["reason"], line["completion_tokens"]
        requests += of_engine.values()
    return requests


def _of_client(request_id: str, routers: Collection[str]) -> str:
    name = next(name for name in routers if request_id.startswith(f"{name}-"))
    return request_id.removeprefix(f"{name}-")


def check_outcomes(
    outcomes: Sequence[Outcome],
    records: Sequence[EngineRequest],
    *,
    killed_engines: Collection[str] = (),
    unheard_engines: Collection[str] = (),
) -> None:
    """Holds what clients were told against what engines did: nothing lost, nothing double, no ending invented.

    Args:
        outcomes: Of all clients.
        records: Of all engines.
        killed_engines: Those that had no time to say how their last requests ended.
        unheard_engines: Those that were cut off for a while, and could go on with what another one was then asked for.
    """
    attempts = {attempt.request_id: attempt for outcome in outcomes for attempt in outcome.attempts}
    by_id: dict[str, list[EngineRequest]] = {request_id: [] for request_id in attempts}
    for record in records:
        assert record.request_id in by_id, f"nobody asked for {record}"
        by_id[record.request_id].append(record)
        assert record.reason is not None or record.engine in killed_engines, f"it never ended: {record}"
    for request_id, attempt in attempts.items():
        done = [record for record in by_id[request_id] if record.reason in {"length", "stop"}]
        heard = [record for record in done if record.engine not in unheard_engines]
        assert len(heard) <= 1, f"computed twice: {done}"
        if attempt.kind == "finished":
            assert {("length", TOKENS)} == {(record.reason, record.completion_tokens) for record in done}, attempt
        # Whoever was told of an end, whatever else came, was told what an engine has said.
        assert set(attempt.ends) <= {record.reason for record in done}, f"{attempt} of {by_id[request_id]}"
