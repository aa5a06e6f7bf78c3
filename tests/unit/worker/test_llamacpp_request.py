"""Requests in llama.cpp's words, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from kvist.engine.v1 import engine_pb2
from kvist.errors import KvistError
from kvist_worker.engines.llamacpp.request import PreparedRequest, RequestLimits, choice_grammar, prepare

LIMITS = RequestLimits(context_tokens=100, vocabulary_size=1000)


def request(change: Callable[[engine_pb2.EngineRequest], object] = lambda _: None) -> PreparedRequest:
    message = engine_pb2.EngineRequest(request_id="r", tokens=engine_pb2.TokenIds(ids=[1, 2, 3]))
    change(message)
    return prepare(message, limits=LIMITS)


def test_what_is_not_said_is_left_to_the_engine() -> None:
    assert request().body == {
        "prompt": [1, 2, 3],
        "n_predict": 97,
        "stream": True,
        "verbose": True,
        "return_tokens": True,
        "return_progress": True,
        "timings_per_token": True,
    }


def test_every_sampling_field_arrives() -> None:
    def change(message: engine_pb2.EngineRequest) -> None:
        sampling = message.sampling
        sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p = 0.5, 0.25, 7, 0.125
        sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty = -0.5, 1.5, 1.25
        sampling.seed, sampling.top_logprobs = -1, 0
        sampling.logit_bias[5] = -100
        message.stop.max_tokens = 500
        message.stop.ignore_eos = True
        message.stop.stop_token_ids.extend([8, 9])

    prepared = request(change)
    wanted = {
        "n_predict": 97,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "frequency_penalty": -0.5,
        "presence_penalty": 1.5,
        "repeat_penalty": 1.25,
        # All ones would ask for a random seed.
        "seed": 0xFFFF_FFFE,
        "n_probs": 1,
        "logit_bias": [[5, -100.0]],
        "ignore_eos": True,
    }
    assert wanted.items() <= prepared.body.items()
    assert (prepared.stop_token_ids, prepared.top_logprobs) == (frozenset({8, 9}), 0)


def test_constraints_become_schemas_and_grammars() -> None:
    spaced = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
    body = request(lambda m: setattr(m.structured_output, "json_object", True)).body
    assert body["json_schema"] == {"type": "object", **spaced}
    schema = request(lambda m: setattr(m.structured_output, "json_schema", '{"type":"array"}')).body["json_schema"]
    assert schema == {"type": "array", **spaced}
    own = '{"x-guidance": {"whitespace_flexible": true}}'
    assert request(lambda m: setattr(m.structured_output, "json_schema", own)).body["json_schema"] == json.loads(own)
    assert request(lambda m: setattr(m.structured_output, "grammar", "root ::= x")).body["grammar"] == "root ::= x"
    grammar = request(lambda m: m.structured_output.choice.texts.extend(["yes", "no"])).body["grammar"]
    assert grammar == 'root ::= "yes" | "no"'
    assert choice_grammar(['a"\\\n']) == 'root ::= "a\\"\\\\\\x0A"'


@pytest.mark.parametrize(
    ("field", "code", "change"),
    [
        ("adapter", "UNSUPPORTED_FIELD", lambda m: setattr(m, "adapter", "lora")),
        ("rank", "INVALID_ARGUMENT", lambda m: setattr(m, "rank", 1)),
        ("kv_transfer", "UNSUPPORTED_FIELD", lambda m: m.kv_transfer.SetInParent()),
        ("kv_hints", "UNSUPPORTED_FIELD", lambda m: m.kv_hints.SetInParent()),
        ("engine_extras.mirostat", "UNSUPPORTED_FIELD", lambda m: m.engine_extras.update({"mirostat": 2})),
        ("sampling.choices", "UNSUPPORTED_FIELD", lambda m: setattr(m.sampling, "choices", 2)),
        ("sampling.prompt_logprobs", "UNSUPPORTED_FIELD", lambda m: setattr(m.sampling, "prompt_logprobs", 0)),
        ("stop.min_tokens", "UNSUPPORTED_FIELD", lambda m: setattr(m.stop, "min_tokens", 1)),
        ("stop.max_tokens", "INVALID_ARGUMENT", lambda m: setattr(m.stop, "max_tokens", 0)),
        ("structured_output.regex", "UNSUPPORTED_FIELD", lambda m: setattr(m.structured_output, "regex", "a")),
        (
            "structured_output.structural_tag",
            "INVALID_ARGUMENT",
            lambda m: setattr(m.structured_output, "structural_tag", "{}"),
        ),
        (
            "structured_output.json_schema",
            "INVALID_ARGUMENT",
            lambda m: setattr(m.structured_output, "json_schema", ""),
        ),
        ("structured_output.choice", "INVALID_ARGUMENT", lambda m: m.structured_output.choice.SetInParent()),
        ("sampling.temperature", "INVALID_ARGUMENT", lambda m: setattr(m.sampling, "temperature", float("nan"))),
        ("sampling.top_p", "INVALID_ARGUMENT", lambda m: setattr(m.sampling, "top_p", 0)),
        ("sampling.top_logprobs", "INVALID_ARGUMENT", lambda m: setattr(m.sampling, "top_logprobs", 21)),
        ("sampling.logit_bias", "INVALID_ARGUMENT", lambda m: m.sampling.logit_bias.update({1000: 1.0})),
        ("tokens", "INVALID_ARGUMENT", lambda m: m.tokens.ids.append(1000)),
        ("tokens", "INVALID_ARGUMENT", lambda m: m.ClearField("prompt")),
    ],
)
def test_a_wrong_field_is_named(field: str, code: str, change: Callable[[engine_pb2.EngineRequest], object]) -> None:
    with pytest.raises(KvistError) as caught:
        request(change)
    assert (caught.value.code, caught.value.not_started) == (code, True)
    assert [violation.field for violation in caught.value.fields] == [field]


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    assert request(lambda m: m.tokens.ids.extend([1] * 96)).body["n_predict"] == 1
    with pytest.raises(KvistError) as caught:
        request(lambda m: m.tokens.ids.extend([1] * 97))
    assert caught.value.code == "CONTEXT_LENGTH_EXCEEDED"
