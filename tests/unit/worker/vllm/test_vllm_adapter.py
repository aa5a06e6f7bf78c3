"""The adapter and its binding on a stub of vLLM's public classes, whose signatures `tests/vllm` compares."""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import struct_pb2

from kvist.engine.v1 import engine_pb2
from kvist.errors import KvistError
from kvist.events.v1 import events_pb2
from kvist_worker import engines
from kvist_worker.engines import vllm as package

SECONDS = 10
STUB = Path(__file__).parents[3] / "support" / "vllm_stub"
REFUSED, OVERFLOW, DEAD, BROKEN, GIVEN_UP, UNKNOWN, ENDLESS = range(900, 907)
STOP, LENGTH, ABORTED = (
    engine_pb2.FINISH_REASON_STOP,
    engine_pb2.FINISH_REASON_LENGTH,
    engine_pb2.FINISH_REASON_ABORTED,
)


class Host:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.followed: dict[int, dict[str, Any]] = {}
        self.loads: dict[int, events_pb2.LoadReport] = {}
        self.said: list[str] = []
        self.failures: queue.Queue[str] = queue.Queue()

    def follow_vllm(self, rank: int, settings_json: str) -> None:
        self.followed[rank] = json.loads(settings_json)

    def clear_ordered(self) -> int:
        self.said.append("clear ordered")
        return 7

    def cache_unknown(self) -> None:
        self.said.append("unknown")

    def report_load(self, report: bytes) -> None:
        load = events_pb2.LoadReport.FromString(report)
        self.loads[load.rank] = load

    def failed(self, reason: str) -> None:
        self.failures.put(reason)


class Sink:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self.deltas: list[tuple[list[int], bytes | None, int | None, int]] = []
        self.first: queue.Queue[None] = queue.Queue()
        self.ends: queue.Queue[Any] = queue.Queue()

    def tokens(self, token_ids: list[int], logprobs: bytes | None, cached_tokens: int | None, choice: int) -> None:
        self.deltas.append((token_ids, logprobs, cached_tokens, choice))
        self.first.put(None)

    def finished(self, finished: bytes, prompt_logprobs: bytes | None = None) -> None:
        del prompt_logprobs
        self.ends.put(engine_pb2.Finished.FromString(finished))

    def failed(
        self, code: str, message: str, *, not_started: bool = False, fields: list[tuple[str, str]] | None = None
    ) -> None:
        self.ends.put((code, message, not_started, fields or []))

    def end(self) -> Any:
        end = self.ends.get(timeout=SECONDS)
        assert self.ends.empty(), "a request has one end"
        return end

    @property
    def token_ids(self) -> list[int]:
        return [token for ids, *_ in self.deltas for token in ids]


class Stubbed:
    """An adapter over the stub."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.host = Host()
        self.description = json.loads(engine.description())
        engine.start(self.host)

    @property
    def vllm(self) -> Any:
        return sys.modules["vllm.v1.engine.async_llm"].AsyncLLM.last

    def submit(self, *prompt: int, **fields: Any) -> Sink:
        sink = Sink()
        fields.setdefault("request_id", f"r-{id(sink)}")
        request = engine_pb2.EngineRequest(tokens=engine_pb2.TokenIds(ids=prompt), **fields)
        self.engine.submit(request.SerializeToString(), sink)
        return sink

    def embed(self, *inputs: list[int]) -> EmbedSink:
        sink = EmbedSink()
        request = engine_pb2.EmbedRequest(inputs=[engine_pb2.TokenIds(ids=ids) for ids in inputs])
        self.engine.embed(request.SerializeToString(), sink)
        return sink


class EmbedSink:
    """Waits for the end of one call for embeddings."""

    def __init__(self) -> None:
        self.ends: queue.Queue[Any] = queue.Queue()
        self.is_left = False

    def finished(self, response: bytes) -> None:
        self.ends.put(engine_pb2.EmbedResponse.FromString(response))

    def failed(self, code: str, message: str, *, not_started: bool = False) -> None:
        self.ends.put((code, message, not_started))

    def is_abandoned(self) -> bool:
        return self.is_left

    def end(self) -> Any:
        end = self.ends.get(timeout=SECONDS)
        assert self.ends.empty(), "a call has one end"
        return end


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stub in the place of vLLM."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm" or name.endswith("vllm.binding")]:
            del sys.modules[name]
        vars(package).pop("binding", None)

    forget()
    monkeypatch.syspath_prepend(str(STUB))
    for name in ("VLLM_HOST_IP", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_NO_USAGE_STATS"):
        # Set while the binding is imported, and restored after the test.
        monkeypatch.setenv(name, "")
    yield
    forget()


@pytest.fixture
def start(stub: None) -> Iterator[Callable[..., Stubbed]]:
    del stub
    started: list[Stubbed] = []

    def start_one(**arguments: Any) -> Stubbed:
        made = Stubbed(engines.create("vllm", {"model": "m", **arguments}))
        started.append(made)
        return made

    yield start_one
    for one in started:
        one.engine.close()
        assert one.vllm.is_shut_down


def test_the_engine_says_what_it_is_and_where_it_publishes(start: Callable[..., Stubbed]) -> None:
    stubbed = start(**{"data-parallel-size": 2, "block_size": 32, "enable-lora": True})
    said = stubbed.description
    assert (said["engine"], said["version"], said["ranks"]) == ("vllm", "0.32.0", 2)
    assert (said["block_size_tokens"], said["kv_blocks"], said["context_tokens"]) == (32, 40, 64)
    assert (said["eos_token_ids"], said["add_bos"], said["bos_token"]) == ([2, 5], True, "<s>")
    assert {name for name, able in said["capabilities"].items() if able} == {
        "logprobs", "json_schema", "grammar", "regex", "structural_tag", "adapters", "kv_events",
    }  # fmt: skip
    assert stubbed.engine.tokenizer_json() == b"{}"
    assert stubbed.host.followed[1] == {
        "endpoint": "tcp://127.0.0.1:5001",
        "replay_endpoint": "tcp://127.0.0.1:6001",
        "engine_rank": 1,
        "hash_algorithm": "sha256_cbor",
    }
    asked = stubbed.vllm.vllm_config.kv_events_config
    assert (asked.endpoint, asked.replay_endpoint, asked.publisher) == ("tcp://*:0", "tcp://*:0", "zmq")
    assert stubbed.vllm.vllm_config.arguments.enable_log_requests is False


def test_an_engine_that_caches_no_prefixes_publishes_nothing(start: Callable[..., Stubbed]) -> None:
    stubbed = start(**{"enable-prefix-caching": False})
    assert (stubbed.host.followed, stubbed.description["capabilities"]["kv_events"]) == ({}, False)


def test_a_request_is_vllms_and_so_is_its_answer(start: Callable[..., Stubbed]) -> None:
    stubbed = start(**{"scheduling-policy": "priority", "lora-modules": {"french": "/adapters/french"}})
    extras = struct_pb2.Struct()
    extras.update({"bad_words": ["no"], "session_id": "s-1"})
    sink = stubbed.submit(
        *range(100, 104),
        sampling=engine_pb2.SamplingParameters(temperature=0.5, top_k=3, seed=9, logit_bias={7: 1.5}, top_logprobs=1),
        stop=engine_pb2.StopConditions(max_tokens=3, min_tokens=1, stop_token_ids=[777], ignore_eos=True),
        structured_output=engine_pb2.StructuredOutput(regex="a+"),
        adapter="french",
        cache_salt="ours",
        priority=-2,
        engine_extras=extras,
    )
    finished = sink.end()
    assert (finished.reason, finished.HasField("stop_token_id")) == (LENGTH, False)
    assert sink.token_ids == [100, 101, 102]
    assert [cached for _, _, cached, _ in sink.deltas] == [16, None, None]
    [position] = engine_pb2.TokenDelta.FromString(sink.deltas[0][1] or b"").logprobs
    assert (position.logprob, [(one.token_id, one.logprob) for one in position.top]) == (-1.5, [(11, -0.5)])
    receipt = finished.receipt
    assert (receipt.prompt_tokens, receipt.cached_tokens, receipt.completion_tokens) == (4, 16, 3)
    phases = (receipt.queue_duration, receipt.prefill_duration, receipt.decode_duration)
    assert [phase.ToMilliseconds() for phase in phases] == [500, 1000, 500]
    [call] = stubbed.vllm.calls
    assert call.prompt == {"type": "token", "prompt_token_ids": [100, 101, 102, 103], "cache_salt": "ours"}
    assert (call.priority, call.rank, call.session_id, call.trace) == (-2, None, "s-1", None)
    assert (call.lora.lora_name, call.lora.lora_path, call.lora.lora_int_id) == ("french", "/adapters/french", 1)
    asked = call.sampling
    assert (asked.temperature, asked.top_k, asked.seed, asked.logit_bias) == (0.5, 3, 9, {7: 1.5})
    assert (asked.max_tokens, asked.min_tokens, asked.stop_token_ids, asked.ignore_eos) == (3, 1, [777], True)
    assert (asked.logprobs, asked.structured_outputs.regex, asked.bad_words) == (1, "a+", ["no"])
    assert (asked.detokenize, asked.output_kind.name) == (False, "DELTA")


def test_what_is_not_said_is_vllms_default_and_the_context_is_the_limit(start: Callable[..., Stubbed]) -> None:
    stubbed = start()
    stubbed.submit(100, 101, priority=5).end()
    [call] = stubbed.vllm.calls
    assert (call.sampling.temperature, call.sampling.max_tokens, call.priority) == (1.0, 62, 0)
    assert call.sampling.logprobs is call.sampling.structured_outputs is None


def test_the_token_that_ends_a_text_is_named_and_not_part_of_it(start: Callable[..., Stubbed]) -> None:
    stubbed = start()
    for end in (2, 777):
        stop = engine_pb2.StopConditions(stop_token_ids=[777])
        sink = stubbed.submit(100, end, 101, stop=stop)
        finished = sink.end()
        assert (sink.token_ids, finished.reason, finished.stop_token_id) == ([100], STOP, end)
        assert finished.receipt.completion_tokens == 2


def test_ranks_are_pinned_and_report_their_own_load(start: Callable[..., Stubbed]) -> None:
    stubbed = start(**{"data-parallel-size": 2})
    endless = stubbed.submit(ENDLESS, 1, rank=1, request_id="endless")
    endless.first.get(timeout=SECONDS)
    [call] = stubbed.vllm.calls
    assert call.rank == 1
    other = stubbed.submit(100, 101, rank=0)
    assert other.end().reason == LENGTH
    busy, idle = stubbed.host.loads[1], stubbed.host.loads[0]
    assert (busy.running_requests + busy.waiting_requests, busy.total_blocks) == (1, 40)
    assert (idle.running_requests, idle.used_blocks, idle.finished_requests_total) == (0, 0, 1)
    stubbed.engine.abort("endless", engine_pb2.ABORT_REASON_CANCELLED)
    assert endless.end().reason == ABORTED
    assert stubbed.vllm.aborted == ["endless"]
    busy = stubbed.host.loads[1]
    assert (busy.running_requests, busy.waiting_requests, busy.used_blocks) == (0, 0, 0)


def test_an_unknown_request_cannot_be_aborted(start: Callable[..., Stubbed]) -> None:
    stubbed = start()
    stubbed.engine.abort("nobody", engine_pb2.ABORT_REASON_CANCELLED)
    assert stubbed.submit(100).end().reason == LENGTH
    assert stubbed.vllm.aborted == []


@pytest.mark.parametrize(
    ("first", "code", "not_started"),
    [
        (REFUSED, "INVALID_ARGUMENT", True),
        (OVERFLOW, "QUEUE_FULL", True),
        (UNKNOWN, "UNKNOWN_MODEL", True),
        (DEAD, "ENGINE_FAILED", False),
        (BROKEN, "ENGINE_FAILED", False),
        (GIVEN_UP, "ENGINE_FAILED", False),
    ],
)
def test_vllms_errors_are_those_of_the_catalogue(
    start: Callable[..., Stubbed], first: int, code: str, not_started: bool
) -> None:
    said, message, was_not_started, _ = start().submit(first, 1).end()
    assert (said, was_not_started) == (code, not_started)
    assert "secret" not in message


@pytest.mark.parametrize(
    ("prompt", "fields", "code", "named"),
    [
        ((), {}, "INVALID_ARGUMENT", "tokens"),
        ((1000,), {}, "INVALID_ARGUMENT", "tokens"),
        ((1,) * 64, {}, "CONTEXT_LENGTH_EXCEEDED", None),
        ((1,), {"rank": 1}, "INVALID_ARGUMENT", "rank"),
        ((1,), {"adapter": "none"}, "UNKNOWN_MODEL", None),
        ((1,), {"kv_hints": struct_pb2.Struct()}, "UNSUPPORTED_FIELD", "kv_hints"),
        ((1,), {"kv_transfer": engine_pb2.KvTransferParameters()}, "UNSUPPORTED_FIELD", "kv_transfer"),
        ((1,), {"stop": engine_pb2.StopConditions(max_tokens=0)}, "INVALID_ARGUMENT", "stop.max_tokens"),
        ((1,), {"stop": engine_pb2.StopConditions(max_tokens=2, min_tokens=3)}, "INVALID_ARGUMENT", "stop.min_tokens"),
        ((1,), {"sampling": engine_pb2.SamplingParameters(top_p=2)}, "INVALID_ARGUMENT", None),
        (
            (1,),
            {"sampling": engine_pb2.SamplingParameters(top_logprobs=21)},
            "INVALID_ARGUMENT",
            "sampling.top_logprobs",
        ),
        (
            (1,),
            {"sampling": engine_pb2.SamplingParameters(logit_bias={1000: 1})},
            "INVALID_ARGUMENT",
            "sampling.logit_bias",
        ),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(
    start: Callable[..., Stubbed], prompt: tuple[int, ...], fields: dict[str, Any], code: str, named: str | None
) -> None:
    said, _, not_started, wrong = start().submit(*prompt, **fields).end()
    assert (said, not_started) == (code, True)
    assert [field for field, _ in wrong] == ([] if named is None else [named])


def test_a_report_of_what_is_held_cannot_be_asked_for(start: Callable[..., Stubbed]) -> None:
    """The ledger counts copies, and such a report looks like copies."""
    extras = struct_pb2.Struct()
    extras.update({"kv_cache_report_mode": "full"})
    code, _, not_started, wrong = start().submit(1, engine_extras=extras).end()
    assert (code, not_started, wrong[0][0]) == ("UNSUPPORTED_FIELD", True, "engine_extras.kv_cache_report_mode")


def test_parameters_of_a_hand_over_go_both_ways(start: Callable[..., Stubbed]) -> None:
    stubbed = start(**{"kv-transfer-config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}})
    assert stubbed.description["capabilities"]["kv_transfer"]
    assert stubbed.description["kv_layout"] == {
        "connector": "ExampleConnector", "tensor_parallel_size": 1, "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
    }  # fmt: skip
    transfer = engine_pb2.KvTransferParameters(connector="ExampleConnector", lease_id="l-1")
    transfer.parameters.update({"do_remote_decode": True, "remote_port": 5600})
    finished = stubbed.submit(100, kv_transfer=transfer).end()
    [call] = stubbed.vllm.calls
    assert call.sampling.extra_args == {"kv_transfer_params": {"do_remote_decode": True, "remote_port": 5600}}
    assert (finished.kv_transfer.connector, finished.kv_transfer.lease_id) == ("ExampleConnector", "l-1")
    assert [list(ids) for ids in finished.kv_transfer.parameters["remote_block_ids"]] == [[1, 2]]


def test_files_that_are_named_by_tokens_alone_are_kept_from_salted_requests(start: Callable[..., Stubbed]) -> None:
    stubbed = start(**{"kv-transfer-config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}})
    code, _, not_started, wrong = stubbed.submit(100, cache_salt="s").end()
    assert (code, not_started, wrong[0][0]) == ("UNSUPPORTED_FIELD", True, "cache_salt")


def test_a_reset_is_told_before_it_is_done(start: Callable[..., Stubbed]) -> None:
    stubbed = start()
    assert stubbed.engine.reset_cache() == 7
    assert stubbed.host.said == ["clear ordered"]
    stubbed.vllm.reset_result = False
    with pytest.raises(KvistError) as refused:
        stubbed.engine.reset_cache()
    assert refused.value.code == "PRECONDITION_FAILED"
    assert stubbed.host.said == ["clear ordered", "clear ordered", "unknown"]


def test_adapters_are_loaded_and_unloaded_and_a_name_means_the_same_files_for_ever(
    start: Callable[..., Stubbed],
) -> None:
    stubbed = start(**{"enable-lora": True, "lora-modules": ["french=/adapters/french"]})
    stubbed.engine.load_adapter("german", "/adapters/german")
    assert stubbed.vllm.adapters == {2: "/adapters/german"}
    assert stubbed.submit(100, adapter="german").end().reason == LENGTH
    assert stubbed.vllm.calls[-1].lora.lora_int_id == 2
    stubbed.engine.unload_adapter("german")
    stubbed.engine.unload_adapter("nobody")
    assert stubbed.vllm.adapters == {}
    assert stubbed.submit(100, adapter="german").end()[0] == "UNKNOWN_MODEL"
    for name, path, code in (
        ("german", "/adapters/other", "ALREADY_EXISTS"),
        ("french", "/adapters/other", "ALREADY_EXISTS"),
        ("new", "/none", "INVALID_ARGUMENT"),
    ):
        with pytest.raises(KvistError) as refused:
            stubbed.engine.load_adapter(name, path)
        assert refused.value.code == code
    stubbed.engine.load_adapter("german", "/adapters/german")
    assert stubbed.vllm.adapters == {2: "/adapters/german"}


def test_without_lora_no_adapter_is_loaded(start: Callable[..., Stubbed]) -> None:
    with pytest.raises(KvistError) as refused:
        start().engine.load_adapter("german", "/adapters/german")
    assert refused.value.code == "NOT_IMPLEMENTED"


def test_a_pooling_model_makes_embeddings_and_says_so(start: Callable[..., Stubbed]) -> None:
    stubbed = start(runner="pooling")
    able = stubbed.description["capabilities"]
    assert {name for name, can in able.items() if can} == {"embeddings"}
    assert not stubbed.host.followed, "nobody asks what its cache holds"
    response = stubbed.embed([7, 8, 9], [5]).end()
    assert [list(one.values) for one in response.embeddings] == [[7, 3], [5, 1]]
    assert [one.prompt_tokens for one in response.embeddings] == [3, 1]
    assert {call.pooling.task for call in stubbed.vllm.calls} == {"embed"}
    assert len({call.request_id for call in stubbed.vllm.calls}) == 2
    assert stubbed.host.loads[0].finished_requests_total == 2
    assert stubbed.host.loads[0].outstanding_prefill_tokens == 0


def test_a_model_that_neither_generates_nor_embeds_is_refused(start: Callable[..., Stubbed]) -> None:
    with pytest.raises(KvistError, match="the model is for classify") as refused:
        start(runner="pooling", convert="classify")
    assert refused.value.code == "INVALID_ARGUMENT"
    assert sys.modules["vllm.v1.engine.async_llm"].AsyncLLM.last.is_shut_down


@pytest.mark.parametrize(("fault", "code"), [(REFUSED, "INVALID_ARGUMENT"), (DEAD, "ENGINE_FAILED")])
def test_one_failed_input_ends_the_others(start: Callable[..., Stubbed], fault: int, code: str) -> None:
    stubbed = start(runner="pooling")
    assert stubbed.embed([ENDLESS], [fault]).end()[0] == code
    assert len(stubbed.vllm.aborted) == 1
    assert stubbed.host.loads[0].outstanding_prefill_tokens == 0


def test_embeddings_that_nobody_waits_for_are_given_up(start: Callable[..., Stubbed]) -> None:
    stubbed = start(runner="pooling")
    sink = stubbed.embed([ENDLESS], [ENDLESS, 1])
    sink.is_left = True
    assert sink.end()[0] == "CANCELLED"
    assert len(stubbed.vllm.aborted) == 2


def test_embeddings_that_run_when_the_worker_ends_are_told(start: Callable[..., Stubbed]) -> None:
    stubbed = start(runner="pooling")
    sink = stubbed.embed([ENDLESS])
    stubbed.engine.close()
    assert sink.end()[0] == "DRAINING"
    assert stubbed.embed([1]).end() == ("DRAINING", "the worker is being stopped", True)


def test_a_dead_engine_core_is_told_once(start: Callable[..., Stubbed]) -> None:
    stubbed = start()
    stubbed.vllm.is_dead = True
    assert "engine core" in stubbed.host.failures.get(timeout=SECONDS)
    with pytest.raises(queue.Empty):
        stubbed.host.failures.get(timeout=0.6)


def test_what_runs_when_the_worker_ends_is_told(start: Callable[..., Stubbed]) -> None:
    stubbed = start()
    sink = stubbed.submit(ENDLESS)
    sink.first.get(timeout=SECONDS)
    stubbed.engine.close()
    assert sink.end()[0] == "DRAINING"
    assert stubbed.submit(1).end()[:1] == ("DRAINING",)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"max-model-len": 9000}, "vLLM refuses them: max_model_len"),
        ({"max-model-len": "many"}, "vLLM refuses them: argument --max-model-len"),
        ({"tensor-parallel-size": 3, "decode-context-parallel-size": 2}, "2 does not divide 3"),
        ({"trust-remote-code": True}, "is refused: it runs code"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(stub: None, arguments: dict[str, Any], why: str) -> None:
    del stub
    with pytest.raises(KvistError) as refused:
        engine = engines.create("vllm", {"model": "m", **arguments})
        assert engine is not None
        try:
            engine.description()
        finally:
            engine.close()
    assert refused.value.code == "INVALID_ARGUMENT"
    assert why in refused.value.message


def test_without_vllm_the_way_to_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "kvist_worker.engines.vllm.binding", raising=False)
    monkeypatch.delattr(package, "binding", raising=False)
    with pytest.raises(KvistError, match="kvist engine install vllm") as refused:
        engines.create("vllm", {})
    assert refused.value.code == "NOT_IMPLEMENTED"
