"""A request in llama.cpp's words. What llama.cpp cannot honor is refused by name."""

import json
from dataclasses import dataclass
from typing import Any

from kvist.engine.v1 import engine_pb2
from kvist.errors import FieldViolation, KvistError, error, invalid_field
from kvist_worker.engines.llamacpp.structures import structural_grammar
from kvist_worker.prompts import before_start, checked_prompt

MAX_TOP_LOGPROBS = 20
# The seed that llama.cpp takes for "draw one".
_RANDOM_SEED = 0xFFFF_FFFF
# In the words of llguidance, which writes the grammar of a schema: one blank after a comma and a colon, none elsewhere,
# as models are used to write JSON on one line.
_WHITE_SPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a prompt may be.

    Attributes:
        context_tokens: Prompt and completion together.
        vocabulary_size: Token ids are below this.
    """

    context_tokens: int
    vocabulary_size: int


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request.

    Attributes:
        request_id: Its id.
        prompt: Token ids.
        cache_salt: Separates caches.
        priority: Smaller runs earlier.
        stop_token_ids: Tokens that end the text, beside the model's own.
        top_logprobs: Alternatives for each token; none for no log-probabilities.
        body: What llama.cpp is asked, without the slot.
    """

    request_id: str
    prompt: tuple[int, ...]
    cache_salt: str
    priority: int
    stop_token_ids: frozenset[int]
    top_logprobs: int | None
    body: dict[str, Any]


def prepare(request: engine_pb2.EngineRequest, *, limits: RequestLimits) -> PreparedRequest:
    """Checks a request and puts it in llama.cpp's words.

    Raises:
        KvistError: It cannot be honored; the error says that the engine has not started on it.
    """
    with before_start():
        return _prepare(request, limits)


def _prepare(request: engine_pb2.EngineRequest, limits: RequestLimits) -> PreparedRequest:
    prompt, room = checked_prompt(request, vocabulary_size=limits.vocabulary_size, context_tokens=limits.context_tokens)
    _refuse_unsupported(request)
    stop = request.stop
    if stop.HasField("max_tokens") and stop.max_tokens == 0:
        raise invalid_field("stop.max_tokens", "must be at least 1")
    sampling = request.sampling
    body: dict[str, Any] = {
        "prompt": list(prompt),
        "n_predict": min(stop.max_tokens, room) if stop.HasField("max_tokens") else room,
        "stream": True,
        # Token ids, the slot and the engine's own reason come only with these.
        "verbose": True,
        "return_tokens": True,
        "return_progress": True,
        "timings_per_token": True,
        **_sampling(sampling, limits),
        **_constraint(request.structured_output),
    }
    if stop.ignore_eos:
        body["ignore_eos"] = True
    top_logprobs = sampling.top_logprobs if sampling.HasField("top_logprobs") else None
    if top_logprobs is not None:
        if top_logprobs > MAX_TOP_LOGPROBS:
            raise invalid_field("sampling.top_logprobs", f"at most {MAX_TOP_LOGPROBS}")
        body["n_probs"] = max(top_logprobs, 1)
    return PreparedRequest(
        request_id=request.request_id,
        prompt=prompt,
        cache_salt=request.cache_salt,
        priority=request.priority,
        stop_token_ids=frozenset(stop.stop_token_ids),
        top_logprobs=top_logprobs,
        body=body,
    )


def _unsupported(field: str, description: str = "llama.cpp cannot honor it") -> KvistError:
    return error("UNSUPPORTED_FIELD", f"{field}: {description}", fields=[FieldViolation(field, description)])


def _refuse_unsupported(request: engine_pb2.EngineRequest) -> None:
    if request.adapter:
        raise _unsupported("adapter", "this worker has no adapters")
    if request.rank != 0:
        raise invalid_field("rank", "this engine has rank 0 only")
    for field in ("kv_transfer", "kv_hints"):
        if request.HasField(field):
            raise _unsupported(field)
    for name in sorted(request.engine_extras.fields):
        raise _unsupported(f"engine_extras.{name}", "this engine takes no further fields")
    if request.sampling.choices > 1:
        raise _unsupported("sampling.choices", "this engine makes one choice for each request")
    if request.sampling.HasField("prompt_logprobs"):
        raise _unsupported("sampling.prompt_logprobs")
    if request.stop.min_tokens > 0:
        raise _unsupported("stop.min_tokens")


def _sampling(sampling: engine_pb2.SamplingParameters, limits: RequestLimits) -> dict[str, Any]:
    body: dict[str, Any] = {}
    ranges = (
        ("temperature", "temperature", 0.0, 2.0),
        ("top_p", "top_p", 0.0, 1.0),
        ("min_p", "min_p", 0.0, 1.0),
        ("frequency_penalty", "frequency_penalty", -2.0, 2.0),
        ("presence_penalty", "presence_penalty", -2.0, 2.0),
        ("repetition_penalty", "repeat_penalty", 0.0, float("inf")),
    )
    given = {descriptor.name for descriptor, _ in sampling.ListFields()}
    for field, name, least, most in ranges:
        if field in given:
            value = getattr(sampling, field)
            # Written so that a value that is no number is refused too.
            if not least <= value <= most or (field in {"top_p", "repetition_penalty"} and value == 0.0):
                raise invalid_field(f"sampling.{field}", f"is outside its range of {least} to {most}")
            body[name] = value
    if sampling.HasField("top_k"):
        body["top_k"] = min(sampling.top_k, limits.vocabulary_size)
    if sampling.HasField("seed"):
        seed = sampling.seed & _RANDOM_SEED
        body["seed"] = seed if seed != _RANDOM_SEED else _RANDOM_SEED - 1
    if sampling.logit_bias:
        if max(sampling.logit_bias) >= limits.vocabulary_size:
            raise invalid_field("sampling.logit_bias", f"token ids are below {limits.vocabulary_size}")
        body["logit_bias"] = [[token, bias] for token, bias in sorted(sampling.logit_bias.items())]
    return body


def _constraint(structured: engine_pb2.StructuredOutput) -> dict[str, Any]:
    match structured.WhichOneof("constraint"):
        case None:
            return {}
        case "json_object":
            return {"json_schema": _spaced({"type": "object"})} if structured.json_object else {}
        case "json_schema":
            try:
                schema = json.loads(structured.json_schema)
            except json.JSONDecodeError:
                raise invalid_field("structured_output.json_schema", "is not JSON") from None
            if not isinstance(schema, dict):
                raise invalid_field("structured_output.json_schema", "must be a JSON object")
            return {"json_schema": _spaced(schema)}
        case "grammar":
            return {"grammar": structured.grammar}
        case "choice":
            texts = list(structured.choice.texts)
            if not texts or not all(texts):
                raise invalid_field("structured_output.choice", "needs at least one text, and none may be empty")
            return {"grammar": choice_grammar(texts)}
        case "structural_tag":
            return {"grammar": structural_grammar(structured.structural_tag)}
        case other:
            raise _unsupported(f"structured_output.{other}")


def _spaced(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, and where its JSON may have white space; a schema that says so itself is left alone.

    The grammar would else allow any number of blanks between two words of JSON, and a small model can spend its whole
    budget on them.
    """
    return {"x-guidance": _WHITE_SPACE, **schema}


def choice_grammar(texts: list[str]) -> str:
    """A GBNF grammar of exactly these texts."""
    return "root ::= " + " | ".join(f'"{_escape(text)}"' for text in texts)


def _escape(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return "".join(
        f"\\x{ord(character):02X}" if character < " " or character == "\x7f" else character for character in escaped
    )
