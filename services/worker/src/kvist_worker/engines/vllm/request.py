"""A request in vLLM's words, without vLLM's types. Pure.

What vLLM would refuse by itself is left to vLLM, whose messages are good; what it would take silently in another
meaning is refused here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format, struct_pb2

from kvist.engine.v1 import engine_pb2
from kvist.errors import FieldViolation, KvistError, error, invalid_field
from kvist_worker.engines.vllm.hand_over import EXAMPLE
from kvist_worker.prompts import before_start, checked_prompt

# Fields that Kvist does not know and vLLM may have: `engine_extras` → keyword of `SamplingParams`.
_SAMPLING_EXTRAS = frozenset({"allowed_token_ids", "bad_words", "thinking_token_budget"})
# `SamplingParameters` whose names are vLLM's.
_SAME_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "prompt_logprobs",
)
_CONSTRAINTS = ("json_schema", "regex", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What requests this engine takes.

    Attributes:
        context_tokens: Prompt and completion together.
        vocabulary_size: Token ids are below this.
        ranks: Data-parallel ranks.
        max_top_logprobs: Most alternatives for each token.
        orders_by_priority: Whether the scheduler looks at priorities.
        connector: What hands KV over; empty for nothing.
    """

    context_tokens: int
    vocabulary_size: int
    ranks: int
    max_top_logprobs: int
    orders_by_priority: bool
    connector: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A checked request.

    Attributes:
        request_id: Its id.
        prompt: Token ids.
        sampling: Keywords of `SamplingParams`.
        structured_output: Keyword of `StructuredOutputsParams` and its value; none for free text.
        top_logprobs: Alternatives for each generated token; none for no log-probabilities.
        prompt_logprobs: Alternatives for each token of the prompt; none for none.
        adapter: Name of a LoRA adapter; empty for the base model.
        cache_salt: Separates caches; empty for the shared one.
        rank: Data-parallel rank that computes it.
        priority: Smaller runs earlier.
        trace_headers: W3C trace context; empty when not traced.
        session_id: Whose conversation it is; none when nobody says.
        expected_cached_tokens: Prompt tokens that the router expects in the cache.
        kv_transfer: What the mesh asks of the connector; none for nothing.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: Mapping[str, Any]
    structured_output: tuple[str, Any] | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    adapter: str = ""
    cache_salt: str = ""
    rank: int = 0
    priority: int = 0
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    session_id: str | None = None
    expected_cached_tokens: int = 0
    kv_transfer: engine_pb2.KvTransferParameters | None = None

    @property
    def is_fetched(self) -> bool:
        """Whether the prompt's KV comes from another engine."""
        return self.kv_transfer is not None and self.kv_transfer.parameters.fields["do_remote_prefill"].bool_value


def prepare(request: engine_pb2.EngineRequest, *, limits: RequestLimits) -> PreparedRequest:
    """Checks a request and puts it in vLLM's words.

    Raises:
        KvistError: It cannot be honored; the error says that the engine has not started on it.
    """
    with before_start():
        return _prepare(request, limits)


def _prepare(request: engine_pb2.EngineRequest, limits: RequestLimits) -> PreparedRequest:
    prompt, room = checked_prompt(request, vocabulary_size=limits.vocabulary_size, context_tokens=limits.context_tokens)
    if request.rank >= limits.ranks:
        raise invalid_field("rank", f"the engine has ranks 0 to {limits.ranks - 1}")
    if request.HasField("kv_hints"):
        raise _unsupported("kv_hints")
    extras, session_id = _extras(request.engine_extras)
    sampling = {**_sampling(request.sampling, limits), **_stop(request.stop, room), **extras}
    kv_transfer = _kv_transfer(request, limits)
    parameters = {} if kv_transfer is None else plain(kv_transfer.parameters)
    if parameters:
        sampling["extra_args"] = {"kv_transfer_params": parameters}
    trace = {"traceparent": request.traceparent, "tracestate": request.tracestate}
    return PreparedRequest(
        request_id=request.request_id,
        prompt=prompt,
        sampling=sampling,
        structured_output=_constraint(request.structured_output),
        top_logprobs=sampling.get("logprobs"),
        prompt_logprobs=sampling.get("prompt_logprobs"),
        adapter=request.adapter,
        cache_salt=request.cache_salt,
        rank=request.rank,
        # Without such a scheduler vLLM refuses any priority; here it is a wish that has no effect.
        priority=request.priority if limits.orders_by_priority else 0,
        trace_headers={name: value for name, value in trace.items() if value},
        session_id=session_id,
        # The last token is always computed.
        expected_cached_tokens=min(request.expected_cached_tokens, len(prompt) - 1),
        kv_transfer=kv_transfer,
    )


def plain(value: struct_pb2.Struct) -> dict[str, Any]:
    """A `Struct` as Python values; whole numbers, which have lost their type on the way, are integers again."""
    converted: dict[str, Any] = _whole(json_format.MessageToDict(value))
    return converted


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    return value


def _unsupported(path: str, description: str = "vLLM cannot honor it") -> KvistError:
    return error("UNSUPPORTED_FIELD", f"{path}: {description}", fields=[FieldViolation(path, description)])


def _sampling(sampling: engine_pb2.SamplingParameters, limits: RequestLimits) -> dict[str, Any]:
    given = {descriptor.name for descriptor, _ in sampling.ListFields()}
    words = {name: getattr(sampling, name) for name in _SAME_NAMES if name in given}
    if sampling.HasField("top_logprobs"):
        words["logprobs"] = sampling.top_logprobs
    for path, name in (("top_logprobs", "logprobs"), ("prompt_logprobs", "prompt_logprobs")):
        if words.get(name, 0) > limits.max_top_logprobs:
            raise invalid_field(f"sampling.{path}", f"at most {limits.max_top_logprobs}")
    if sampling.logit_bias:
        if max(sampling.logit_bias) >= limits.vocabulary_size:
            raise invalid_field("sampling.logit_bias", f"token ids are below {limits.vocabulary_size}")
        words["logit_bias"] = dict(sorted(sampling.logit_bias.items()))
    if sampling.choices > 1:
        words["n"] = sampling.choices
    return words


def _stop(stop: engine_pb2.StopConditions, room: int) -> dict[str, Any]:
    if stop.HasField("max_tokens") and stop.max_tokens == 0:
        raise invalid_field("stop.max_tokens", "must be at least 1")
    words: dict[str, Any] = {"max_tokens": min(stop.max_tokens, room) if stop.HasField("max_tokens") else room}
    if stop.min_tokens:
        if stop.min_tokens > words["max_tokens"]:
            raise invalid_field("stop.min_tokens", f"only {words['max_tokens']} tokens may be generated")
        words["min_tokens"] = stop.min_tokens
    if stop.stop_token_ids:
        words["stop_token_ids"] = list(stop.stop_token_ids)
    if stop.ignore_eos:
        words["ignore_eos"] = True
    return words


def _constraint(structured: engine_pb2.StructuredOutput) -> tuple[str, Any] | None:
    kind = structured.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "json_object":
        return ("json_object", True) if structured.json_object else None
    if kind == "choice":
        texts = list(structured.choice.texts)
        if not texts or not all(texts):
            raise invalid_field("structured_output.choice", "needs at least one text, and none may be empty")
        return ("choice", texts)
    if kind in _CONSTRAINTS:
        return ("json" if kind == "json_schema" else kind, getattr(structured, kind))
    raise _unsupported(f"structured_output.{kind}")


def _extras(extras: struct_pb2.Struct) -> tuple[dict[str, Any], str | None]:
    words: dict[str, Any] = {}
    session_id = None
    for name, value in plain(extras).items():
        path = f"engine_extras.{name}"
        if name == "session_id":
            if not isinstance(value, str):
                raise invalid_field(path, "must be a text")
            session_id = value
        elif name in _SAMPLING_EXTRAS:
            words[name] = value
        else:
            known = ", ".join(sorted({*_SAMPLING_EXTRAS, "session_id"}))
            raise _unsupported(path, f"this engine takes {known}")
    return words, session_id


def _kv_transfer(request: engine_pb2.EngineRequest, limits: RequestLimits) -> engine_pb2.KvTransferParameters | None:
    if limits.connector == EXAMPLE and request.cache_salt:
        # Its files are named by token ids alone: salts would share them.
        raise _unsupported("cache_salt", f"{EXAMPLE} cannot keep salts apart")
    if not request.HasField("kv_transfer"):
        return None
    if not limits.connector:
        raise _unsupported("kv_transfer", "this engine was started without a KV connector")
    return request.kv_transfer
