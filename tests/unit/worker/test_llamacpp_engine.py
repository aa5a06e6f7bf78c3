"""The adapter over a server whose every word the test says."""

from __future__ import annotations

import json
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xllamacpp")

from kvist.engine.v1 import engine_pb2
from kvist.events.v1 import events_pb2
from kvist_worker import gguf_tokenizer
from kvist_worker.engines.llamacpp.adapter import LlamaCppEngine
from kvist_worker.engines.llamacpp.model import LlamaCppArguments

SECONDS = 10
SIZE = 4
END = 3


class Ledger:
    """A host that counts copies."""

    def __init__(self) -> None:
        self.copies: Counter[int] = Counter()
        self.load = events_pb2.LoadReport()

    def block_hashes(self, tokens: list[int], *, adapter: str = "", cache_salt: str = "") -> list[int]:
        whole = len(tokens) // SIZE * SIZE
        return [hash((adapter, cache_salt, *tokens[: end + SIZE])) for end in range(0, whole, SIZE)]

    def stored(
        self, rank: int, hashes: list[int], parent: int | None, tokens: list[int], *, adapter: str, cache_salt: str
    ) -> None:
        assert len(tokens) == SIZE * len(hashes)
        assert parent is None or self.copies[parent] > 0
        self.copies.update(hashes)

    def removed(self, rank: int, hashes: list[int]) -> None:
        self.copies.subtract(hashes)
        assert min(self.copies.values()) >= 0

    def report_load(self, report: bytes) -> None:
        self.load = events_pb2.LoadReport.FromString(report)

    def claimed(self, tokens: list[int], salt: str = "") -> int:
        claimed = 0
        for block in self.block_hashes(tokens, cache_salt=salt):
            if self.copies[block] == 0:
                break
            claimed += 1
        return claimed


class Sink:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.cached: int | None = None
        self.logprobs: list[engine_pb2.TokenLogprobs] = []
        self.end: Any = None
        self._ended = threading.Event()

    def tokens(self, ids: list[int], logprobs: bytes | None = None, cached: int | None = None) -> None:
        assert self.end is None
        assert (cached is None) == bool(self.ids)
        self.ids += ids
        self.cached = self.cached if cached is None else cached
        if logprobs is not None:
            self.logprobs += engine_pb2.TokenDelta.FromString(logprobs).logprobs

    def finished(self, finished: bytes) -> None:
        self._end(engine_pb2.Finished.FromString(finished))

    def failed(
        self, code: str, message: str, *, not_started: bool = False, fields: list[tuple[str, str]] | None = None
    ) -> None:
        self._end((code, not_started))

    def wait(self) -> Any:
        assert self._ended.wait(SECONDS)
        return self.end

    def _end(self, end: object) -> None:
        assert self.end is None
        self.end = end
        self._ended.set()


class Call:
    """One running request of the fake server: the test sends its chunks."""

    def __init__(self, body: dict[str, Any], callback: Callable[[dict[str, Any]], bool]) -> None:
        self.body = body
        self.slot = body["id_slot"]
        self.done = threading.Event()
        self._callback = callback
        self._drawn = 0
        self._timings = {"cache_n": 0, "prompt_n": 0, "prompt_ms": 0.0, "predicted_n": 0, "predicted_ms": 0.0}

    def progress(self, processed: int, cached: int = 0) -> bool:
        self._timings |= {"cache_n": cached, "prompt_n": processed - cached, "prompt_ms": float(processed)}
        progress = {"total": len(self.body["prompt"]), "cache": cached, "processed": processed, "time_ms": 0}
        return self._send("", [], prompt_progress=progress)

    def token(self, token: int, text: str = "a", count: int = 1, **choice: Any) -> bool:
        self._drawn += count
        self._timings |= {"predicted_n": self._drawn, "predicted_ms": float(self._drawn)}
        return self._send(text, [token], choice=choice)

    def stop(self, kind: str, slot: int | None = None) -> None:
        self._send("", [], stop=True, stop_type=kind, id_slot=self.slot if slot is None else slot)
        self.done.set()

    def refuse(self, kind: str) -> None:
        self._callback({"error": {"code": 400, "message": "no", "type": kind}})
        self.done.set()

    def _send(
        self, text: str, tokens: list[int], *, choice: Any = None, prompt_progress: Any = None, **details: Any
    ) -> bool:
        verbose = {"tokens": tokens, "stop": False, "id_slot": -1, "tokens_predicted": self._drawn, **details}
        chunk = {"choices": [{"text": text, **(choice or {})}], "timings": dict(self._timings), "__verbose": verbose}
        if prompt_progress is not None:
            chunk["prompt_progress"] = prompt_progress
        if self._callback(chunk):
            self.done.set()
            return True
        return False


class FakeServer:
    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self.is_ending = threading.Event()

    def handle_completions(self, body: dict[str, Any], callback: Callable[[dict[str, Any]], bool]) -> None:
        call = Call(body, callback)
        self.calls.put(call)
        for _ in range(SECONDS * 100):
            if call.done.wait(0.01) or self.is_ending.is_set():
                return
        raise AssertionError("the test has left a call open")

    def next(self) -> Call:
        return self.calls.get(timeout=SECONDS)


class Bench:
    def __init__(self, folder: Path, **arguments: Any) -> None:
        model = folder / "model.gguf"
        model.write_bytes(b"")
        checked = LlamaCppArguments(model_path=model, block_size_tokens=SIZE, **{"slots": 2, **arguments})
        self.server, self.ledger = FakeServer(), Ledger()
        self.engine = LlamaCppEngine(checked, server=lambda *_: self.server)
        self.engine.start(self.ledger)  # type: ignore[arg-type]

    def submit(self, request_id: str, *prompt: int, **fields: Any) -> Sink:
        message = engine_pb2.EngineRequest(request_id=request_id, tokens=engine_pb2.TokenIds(ids=prompt), **fields)
        sink = Sink()
        self.engine.submit(message.SerializeToString(), sink)
        return sink


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    vocabulary = [*"<>ab", *map(str, range(10)), *"cdefghijklmnopqrstuvwxyz"]
    document = gguf_tokenizer.tokenizer_document(
        vocabulary, [3, 3, 1, 3] + [1] * (len(vocabulary) - 4), [], splits_digits=True
    )
    converted = gguf_tokenizer.ConvertedTokenizer(
        json=json.dumps(document).encode(),
        chat_template="",
        bos_token="",
        eos_token="",
        add_bos=False,
        eos_token_ids=(END,),
        training_context_tokens=0,
        has_recurrent_state=False,
    )
    monkeypatch.setattr(gguf_tokenizer, "load", lambda *_, **__: converted)
    made: list[Bench] = []

    def make(**arguments: Any) -> Bench:
        made.append(Bench(tmp_path, **arguments))
        return made[-1]

    yield make
    for one in made:
        # Whatever the test left running ends as if the engine had.
        one.server.is_ending.set()
        one.engine.close()


def answer(call: Call, *tokens: int, cached: int = 0) -> None:
    call.progress(len(call.body["prompt"]), cached)
    for token in tokens:
        call.token(token)
    call.stop("limit")


def test_blocks_are_claimed_after_the_first_token_and_cached_tokens_reported(bench: Callable[..., Bench]) -> None:
    one = bench()
    prompt = [4, 5, 6, 7, 8, 9]
    sink = one.submit("a", *prompt)
    call = one.server.next()
    assert call.body["cache_prompt"]
    call.progress(0)
    call.progress(6)
    assert one.ledger.claimed(prompt) == 0
    assert one.ledger.load.outstanding_prefill_tokens == 0
    call.token(10)
    assert one.ledger.claimed(prompt) == 1
    call.token(11)
    call.token(12)
    call.stop("limit")
    finished = sink.wait()
    assert (sink.ids, sink.cached, finished.reason) == ([10, 11, 12], 0, engine_pb2.FINISH_REASON_LENGTH)
    # The last token is not in the cache: eight tokens are, two blocks.
    assert one.ledger.claimed([*prompt, 10, 11]) == 2
    sink = one.submit("b", *prompt, 10, 11, 12)
    call = one.server.next()
    answer(call, 9, cached=8)
    receipt = sink.wait().receipt
    assert (receipt.cached_tokens, receipt.claimed_blocks, receipt.prompt_tokens) == (8, 2, 9)
    assert (receipt.block_size_tokens, receipt.completion_tokens) == (SIZE, 1)
    assert one.ledger.load.finished_requests_total == 2


def test_blocks_beyond_the_common_prefix_go_before_the_engine_hears_of_it(bench: Callable[..., Bench]) -> None:
    one = bench(slots=1)
    first = list(range(4, 17))
    sink = one.submit("a", *first)
    answer(one.server.next(), 9)
    sink.wait()
    assert one.ledger.claimed(first) == 3
    other = [*first[:6], 30, 31]
    one.submit("b", *other)
    one.server.next()
    assert one.ledger.claimed(first) == 1


def test_salts_share_nothing(bench: Callable[..., Bench]) -> None:
    one = bench(slots=1)
    prompt = list(range(4, 13))
    for salt, may_reuse in (("", True), ("x", False), ("x", True), ("", False)):
        sink = one.submit("a", *prompt, cache_salt=salt)
        call = one.server.next()
        assert call.body["cache_prompt"] is may_reuse
        answer(call, 9, cached=8 if may_reuse and salt else 0)
        sink.wait()
        assert (one.ledger.claimed(prompt, salt), one.ledger.claimed(prompt, "" if salt else "x")) == (2, 0)


def test_what_waits_runs_by_priority_and_then_in_order(bench: Callable[..., Bench]) -> None:
    one = bench(slots=1, max_waiting_requests=3)
    one.submit("running", 4)
    running = one.server.next()
    sinks = [
        one.submit(name, token, priority=priority) for name, token, priority in (("a", 5, 1), ("b", 6, 0), ("c", 7, 0))
    ]
    assert one.submit("d", 8).wait() == ("QUEUE_FULL", True)
    assert (one.ledger.load.running_requests, one.ledger.load.waiting_requests) == (1, 3)
    one.engine.abort("c", engine_pb2.ABORT_REASON_DEADLINE)
    assert sinks[2].wait().reason == engine_pb2.FINISH_REASON_ABORTED
    answer(running, 9)
    for expected in (6, 5):
        call = one.server.next()
        assert call.body["prompt"] == [expected]
        answer(call, 9)
    assert {sink.wait().reason for sink in sinks[:2]} == {engine_pb2.FINISH_REASON_LENGTH}


def test_an_abort_ends_the_prefill_at_its_next_step(bench: Callable[..., Bench]) -> None:
    one = bench()
    prompt = list(range(4, 20))
    sink = one.submit("a", *prompt)
    call = one.server.next()
    assert not call.progress(0)
    assert not call.progress(8)
    one.engine.abort("a", engine_pb2.ABORT_REASON_CANCELLED)
    assert call.progress(12)
    finished = sink.wait()
    assert (finished.reason, finished.receipt.completion_tokens) == (engine_pb2.FINISH_REASON_ABORTED, 0)
    # What was computed is there.
    assert one.ledger.claimed(prompt) == 3


def test_a_stop_string_found_by_the_router_is_a_regular_end(bench: Callable[..., Bench]) -> None:
    one = bench()
    sink = one.submit("a", 4)
    call = one.server.next()
    call.token(5)
    one.engine.abort("a", engine_pb2.ABORT_REASON_STOP_STRING)
    assert call.token(6)
    finished = sink.wait()
    assert (finished.reason, finished.HasField("stop_token_id")) == (engine_pb2.FINISH_REASON_STOP, False)


def test_tokens_that_end_the_text_are_no_part_of_it(bench: Callable[..., Bench]) -> None:
    one = bench()
    sink = one.submit("own", 4)
    call = one.server.next()
    # A control token has no text; only the end tells whether it ended the text.
    for token, text in ((5, "a"), (0, ""), (6, "a"), (END, "")):
        call.token(token, text)
    call.stop("eos")
    finished = sink.wait()
    assert (sink.ids, finished.stop_token_id) == ([5, 0, 6], END)
    assert (finished.reason, finished.receipt.completion_tokens) == (engine_pb2.FINISH_REASON_STOP, 4)
    sink = one.submit("asked", 4, stop=engine_pb2.StopConditions(stop_token_ids=[7]))
    call = one.server.next()
    assert not call.token(6)
    assert call.token(7)
    finished = sink.wait()
    assert (sink.ids, finished.stop_token_id, finished.reason) == ([6], 7, engine_pb2.FINISH_REASON_STOP)


def test_logprobs_come_with_their_tokens(bench: Callable[..., Bench]) -> None:
    one = bench()
    sink = one.submit("a", 4, sampling=engine_pb2.SamplingParameters(top_logprobs=1))
    call = one.server.next()
    assert call.body["n_probs"] == 1
    content = [{"id": 5, "logprob": -0.5, "top_logprobs": [{"id": 5, "logprob": -0.5}]}]
    call.token(5, logprobs={"content": content})
    call.stop("limit")
    sink.wait()
    assert sink.logprobs == [
        engine_pb2.TokenLogprobs(logprob=-0.5, top=[engine_pb2.TopLogprob(token_id=5, logprob=-0.5)])
    ]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("exceed_context_size_error", ("CONTEXT_LENGTH_EXCEEDED", True)),
        ("invalid_request_error", ("INVALID_ARGUMENT", True)),
        ("server_error", ("ENGINE_FAILED", False)),
    ],
)
def test_an_error_of_the_engine_ends_the_request(
    bench: Callable[..., Bench], kind: str, expected: tuple[str, bool]
) -> None:
    one = bench(slots=1)
    prompt = list(range(4, 13))
    sink = one.submit("a", *prompt)
    answer(one.server.next(), 9)
    sink.wait()
    sink = one.submit("b", *prompt)
    one.server.next().refuse(kind)
    assert sink.wait() == expected
    # A refused request has not touched the slot; after a failure nothing is sure.
    assert one.ledger.claimed(prompt) == (2 if expected[1] else 0)


def test_an_end_without_a_reason_is_a_failure(bench: Callable[..., Bench]) -> None:
    one = bench()
    sink = one.submit("a", 4)
    call = one.server.next()
    call.token(5)
    call.done.set()
    assert sink.wait() == ("ENGINE_FAILED", False)


def test_another_slot_than_the_pinned_one_is_a_failure(bench: Callable[..., Bench]) -> None:
    one = bench()
    prompt = list(range(4, 13))
    sink = one.submit("a", *prompt)
    call = one.server.next()
    call.token(5)
    call.stop("limit", slot=1 - call.slot)
    assert sink.wait() == ("ENGINE_FAILED", False)
    assert one.ledger.claimed(prompt) == 0


def test_a_wrong_account_is_taken_back(bench: Callable[..., Bench]) -> None:
    one = bench(slots=1)
    prompt = list(range(4, 17))
    sink = one.submit("a", *prompt)
    answer(one.server.next(), 9)
    sink.wait()
    sink = one.submit("b", *prompt)
    call = one.server.next()
    call.progress(5, cached=5)
    assert one.ledger.claimed(prompt) == 1
    answer(call, 9, cached=5)
    receipt = sink.wait().receipt
    # The receipt shows the violation: fewer tokens than the three claimed blocks.
    assert (receipt.claimed_blocks, receipt.cached_tokens) == (3, 5)
    assert one.ledger.claimed(prompt) == 3


def test_a_reset_forgets_everything(bench: Callable[..., Bench]) -> None:
    one = bench(slots=1)
    prompt = list(range(4, 13))
    sink = one.submit("a", *prompt)
    answer(one.server.next(), 9)
    sink.wait()
    assert one.engine.reset_cache() == 2
    assert one.ledger.claimed(prompt) == 0
    sink = one.submit("b", *prompt)
    call = one.server.next()
    assert not call.body["cache_prompt"]
    # What runs while the cache is reset is not claimed either.
    assert one.engine.reset_cache() == 0
    answer(call, 9)
    sink.wait()
    assert one.ledger.claimed(prompt) == 0


def test_a_second_request_of_the_same_id_is_refused(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.submit("a", 4)
    assert one.submit("a", 4).wait() == ("DUPLICATE_REQUEST", True)


def test_closing_ends_what_waits_and_what_runs(bench: Callable[..., Bench]) -> None:
    one = bench(slots=1)
    running, waiting = one.submit("a", 4), one.submit("b", 5)
    call = one.server.next()
    call.token(6)
    closing = threading.Thread(target=one.engine.close)
    closing.start()
    assert waiting.wait() == ("DRAINING", True)
    assert call.token(7)
    assert running.wait() == ("DRAINING", False)
    closing.join(SECONDS)
    assert one.submit("c", 4).wait() == ("DRAINING", True)
