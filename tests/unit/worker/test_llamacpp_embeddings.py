"""The embedding adapter over a server whose every word the test says."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xllamacpp")

from kvist.engine.v1 import engine_pb2
from kvist.events.v1 import events_pb2
from kvist_worker import gguf_tokenizer
from kvist_worker.engines.llamacpp.embeddings import LlamaCppEmbedder
from kvist_worker.engines.llamacpp.model import LlamaCppArguments

SECONDS = 10
SLOTS = 2


class Host:
    def __init__(self) -> None:
        self.load = events_pb2.LoadReport()

    def report_load(self, report: bytes) -> None:
        self.load = events_pb2.LoadReport.FromString(report)


class Sink:
    def __init__(self) -> None:
        self.is_left = False
        self.end: Any = None
        self._ended = threading.Event()

    def finished(self, response: bytes) -> None:
        self._end(engine_pb2.EmbedResponse.FromString(response))

    def failed(self, code: str, message: str, *, not_started: bool = False, retry_after_ms: int | None = None) -> None:
        self._end((code, not_started))

    def is_abandoned(self) -> bool:
        return self.is_left

    def wait(self) -> Any:
        assert self._ended.wait(SECONDS)
        return self.end

    def _end(self, end: object) -> None:
        assert self.end is None
        self.end = end
        self._ended.set()


class Server:
    """Answers what the test hands it: one answer for each group of inputs."""

    def __init__(self) -> None:
        self.groups: queue.Queue[list[list[int]]] = queue.Queue()
        self.answers: queue.Queue[dict[str, Any] | Exception] = queue.Queue()

    def handle_embeddings(self, body: dict[str, Any]) -> dict[str, Any]:
        self.groups.put(body["input"])
        answer = self.answers.get(timeout=SECONDS)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def answer(self) -> list[list[int]]:
        """Embeds the next group, each input as its first token and its length; the answer's order is another."""
        group = self.groups.get(timeout=SECONDS)
        data = [{"index": place, "embedding": [float(ids[0]), float(len(ids))]} for place, ids in enumerate(group)]
        self.answers.put({"data": data[::-1]})
        return group


class Bench:
    def __init__(self, folder: Path, **arguments: Any) -> None:
        model = folder / "model.gguf"
        model.touch()
        self.server, self.host = Server(), Host()
        self.engine = LlamaCppEmbedder(
            LlamaCppArguments(model_path=model, slots=SLOTS, embeddings=True, **arguments),
            server=lambda *_: self.server,
        )
        self.engine.start(self.host)

    def embed(self, *inputs: list[int]) -> Sink:
        request = engine_pb2.EmbedRequest(inputs=[engine_pb2.TokenIds(ids=ids) for ids in inputs])
        sink = Sink()
        self.engine.embed(request.SerializeToString(), sink)
        return sink


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    converted = gguf_tokenizer.ConvertedTokenizer(
        json=b"{}",
        chat_template="",
        bos_token="",
        eos_token="",
        add_bos=False,
        eos_token_ids=(),
        training_context_tokens=64,
        has_recurrent_state=False,
    )
    monkeypatch.setattr(gguf_tokenizer, "load", lambda *_, **__: converted)
    made: list[Bench] = []

    def make(**arguments: Any) -> Bench:
        made.append(Bench(tmp_path, **arguments))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


def test_it_says_that_it_embeds_and_nothing_else(bench: Callable[..., Bench]) -> None:
    said = json.loads(bench().engine.description())
    assert {"embeddings"} == {name for name, can in said["capabilities"].items() if can}
    assert (64, SLOTS, "") == (said["context_tokens"], said["max_running_requests"], said["chat_template"])


def test_inputs_go_in_groups_and_keep_their_order(bench: Callable[..., Bench]) -> None:
    one = bench()
    sink = one.embed([5, 6, 7], [8], [9, 9])
    assert [[5, 6, 7], [8]] == one.server.answer()
    assert [[9, 9]] == one.server.answer()
    embeddings = sink.wait().embeddings
    assert [[5, 3], [8, 1], [9, 2]] == [list(embedding.values) for embedding in embeddings]
    assert [3, 1, 2] == [embedding.prompt_tokens for embedding in embeddings]
    one.engine.close()
    load = one.host.load
    assert (0, 0, 1) == (load.running_requests, load.outstanding_prefill_tokens, load.finished_requests_total)


def test_calls_beyond_the_queue_are_refused(bench: Callable[..., Bench]) -> None:
    one = bench(max_waiting_requests=1)
    sinks = [one.embed([number]) for number in range(SLOTS + 1)]
    assert ("QUEUE_FULL", True) == one.embed([9]).wait()
    for _ in sinks:
        one.server.answer()
    assert all(sink.wait().embeddings for sink in sinks)


def test_a_call_whose_caller_has_gone_ends_between_groups(bench: Callable[..., Bench]) -> None:
    one = bench()
    sink = one.embed(*([number] for number in range(2 * SLOTS)))
    group = one.server.groups.get(timeout=SECONDS)
    sink.is_left = True
    one.server.answers.put({"data": [{"index": place, "embedding": [0.0]} for place in range(len(group))]})
    assert ("CANCELLED", False) == sink.wait()
    assert one.server.groups.empty()


def test_what_llamacpp_refuses_or_throws_fails_that_call_alone(bench: Callable[..., Bench]) -> None:
    one = bench()
    for failure in ({"error": {"code": 500, "message": "too large"}}, RuntimeError("from C++"), {"data": []}):
        one.server.answers.put(failure)
        assert ("ENGINE_FAILED", False) == one.embed([1]).wait()
        one.server.groups.get(timeout=SECONDS)
    sink = one.embed([1])
    one.server.answer()
    assert 1 == len(sink.wait().embeddings)


def test_after_the_end_nothing_is_taken(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.engine.close()
    assert ("DRAINING", True) == one.embed([1]).wait()
