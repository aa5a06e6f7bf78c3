"""Writes docs/reference/engines.md: what each engine can do, asked of the code that refuses.

Each engine gets the same requests twice: as it is without configuration, and with all that concerns Kvist. What it
refuses both times it cannot do; what it refuses once needs configuration. What it says of itself in `Capabilities` has
to agree. With `--check` nothing is written; the exit code is 1 when the page differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from google.protobuf import struct_pb2

from kvist import _core
from kvist.engine.v1 import engine_pb2
from kvist.errors import KvistError
from kvist_worker.engine import KvLayout
from kvist_worker.engines.llamacpp import adapter as llamacpp_adapter
from kvist_worker.engines.llamacpp import embeddings as llamacpp_embeddings
from kvist_worker.engines.llamacpp import request as llamacpp_request
from kvist_worker.engines.vllm import adapter as vllm_adapter
from kvist_worker.engines.vllm import request as vllm_request
from kvist_worker.engines.vllm.facts import EngineFacts, EventSockets

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "engines.md"

CONTEXT_TOKENS = 4_096
VOCABULARY_SIZE = 1_000
# In the form that both engines read.
STRUCTURAL_TAG = '{"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}'


@dataclass(frozen=True, slots=True)
class Mode:
    """An engine, and how it is reached.

    Attributes:
        name: As the page calls it.
        refusal: Why it does not take a request, by whether it is configured; none when it does.
        capabilities: What it says of itself, likewise.
        ranks: Data-parallel ranks of the example, likewise.
        loads_adapters: Whether adapters come and go while it runs, likewise.
        embeds: Whether it makes embeddings when it is started for them.
    """

    name: str
    refusal: Callable[[engine_pb2.EngineRequest, bool], str | None]
    capabilities: Callable[[bool], Mapping[str, bool]]
    ranks: Callable[[bool], int]
    loads_adapters: Callable[[bool], bool]
    embeds: Callable[[], bool]


def python_refusal(prepare: Callable[[], object]) -> str | None:
    """What a Python engine says of a request."""
    try:
        prepare()
    except KvistError as failure:
        return failure.message
    return None


def vllm_facts(*, is_configured: bool) -> EngineFacts:
    """A vLLM engine as it is without arguments, or with all that concern Kvist."""
    return EngineFacts(
        version="",
        context_tokens=CONTEXT_TOKENS,
        max_running_requests=1,
        max_top_logprobs=20,
        vocabulary_size=VOCABULARY_SIZE,
        block_size_tokens=16,
        kv_blocks=1,
        ranks=2 if is_configured else 1,
        hash_algorithm="sha256_cbor",
        # The adapter turns them on by itself.
        event_sockets={0: EventSockets("", "")},
        orders_by_priority=is_configured,
        embeds=False,
        kv_layout=KvLayout(connector="NixlConnector") if is_configured else None,
        takes_adapters=is_configured,
        is_traced=False,
        tokenizer_json=None,
        chat_template="",
        bos_token="",
        eos_token="",
        add_bos=False,
        eos_token_ids=(),
    )


def vllm_mode() -> Mode:
    """The engine `vllm`, inside a worker."""

    def refusal(request: engine_pb2.EngineRequest, is_configured: bool) -> str | None:
        facts = vllm_facts(is_configured=is_configured)
        if request.adapter and not facts.takes_adapters:
            return "adapter: vLLM was started without enable-lora"
        limits = vllm_request.RequestLimits(
            context_tokens=facts.context_tokens,
            vocabulary_size=facts.vocabulary_size,
            ranks=facts.ranks,
            max_top_logprobs=facts.max_top_logprobs,
            orders_by_priority=facts.orders_by_priority,
            connector="" if facts.kv_layout is None else facts.kv_layout.connector,
        )
        return python_refusal(lambda: vllm_request.prepare(request, limits=limits))

    return Mode(
        "`vllm`",
        refusal,
        lambda is_configured: asdict(vllm_facts(is_configured=is_configured).capabilities),
        lambda is_configured: vllm_facts(is_configured=is_configured).ranks,
        lambda is_configured: is_configured and hasattr(vllm_adapter.VllmEngine, "load_adapter"),
        lambda: replace(vllm_facts(is_configured=True), embeds=True).capabilities.embeddings,
    )


def llamacpp_mode() -> Mode:
    """The engine `llamacpp`, inside a worker."""
    limits = llamacpp_request.RequestLimits(context_tokens=CONTEXT_TOKENS, vocabulary_size=VOCABULARY_SIZE)
    return Mode(
        "`llamacpp`",
        lambda request, _: python_refusal(lambda: llamacpp_request.prepare(request, limits=limits)),
        lambda _: asdict(llamacpp_adapter.CAPABILITIES),
        lambda _: 1,
        lambda _: hasattr(llamacpp_adapter.LlamaCppEngine, "load_adapter"),
        lambda: llamacpp_embeddings.CAPABILITIES.embeddings,
    )


def core_mode(name: str, mode: str, mode_of_embeddings: str) -> Mode:
    """An engine of the core."""

    def said(of: str, is_configured: bool) -> Mapping[str, bool]:
        capabilities = engine_pb2.Capabilities.FromString(_core.engine_mode(of, is_configured)[0])
        return {field.name: getattr(capabilities, field.name) for field in capabilities.DESCRIPTOR.fields}

    return Mode(
        name,
        lambda request, is_configured: _core.engine_refusal(mode, is_configured, request.SerializeToString()),
        lambda is_configured: said(mode, is_configured),
        lambda is_configured: _core.engine_mode(mode, is_configured)[1],
        # None of them implements it.
        lambda _: False,
        lambda: said(mode_of_embeddings, True)["embeddings"],
    )


MODES = (
    vllm_mode(),
    core_mode("`attached`, generate", "attached generate", "attached generate"),
    core_mode("`attached`, completions", "attached completions", "attached completions"),
    llamacpp_mode(),
    core_mode("`sim`", "sim", "sim of embeddings"),
)


def asked(**fields: Any) -> engine_pb2.EngineRequest:
    """A request with something in it."""
    return engine_pb2.EngineRequest(request_id="r", tokens=engine_pb2.TokenIds(ids=[1, 2, 3]), **fields)


def sampling(**fields: Any) -> engine_pb2.EngineRequest:
    """A request with something to be done while tokens are drawn."""
    return asked(sampling=engine_pb2.SamplingParameters(**fields))


def constrained(**fields: Any) -> engine_pb2.EngineRequest:
    """A request whose output is constrained."""
    return asked(structured_output=engine_pb2.StructuredOutput(**fields))


def extra(name: str, value: Any) -> engine_pb2.EngineRequest:
    """A request with a field that Kvist does not know."""
    extras = struct_pb2.Struct()
    extras.update({name: value})
    return asked(engine_extras=extras)


# What is asked, and the capability that has to say the same.
ROWS: tuple[tuple[str, engine_pb2.EngineRequest, str], ...] = (
    ("log-probabilities", sampling(top_logprobs=1), "logprobs"),
    ("log-probabilities of the prompt", sampling(prompt_logprobs=1), ""),
    ("several choices in one request", sampling(choices=2), ""),
    ("seed", sampling(seed=1), ""),
    ("`logit_bias`", sampling(logit_bias={1: 1.0}), ""),
    ("`min_tokens`", asked(stop=engine_pb2.StopConditions(max_tokens=3, min_tokens=2)), ""),
    ("further stop tokens", asked(stop=engine_pb2.StopConditions(stop_token_ids=[7])), ""),
    ("JSON object", constrained(json_object=True), ""),
    ("JSON schema", constrained(json_schema='{"type": "object"}'), "json_schema"),
    ("regular expression", constrained(regex="a*"), "regex"),
    ("grammar, in the engine's notation", constrained(grammar='root ::= "a"'), "grammar"),
    ("choice of texts", constrained(choice=engine_pb2.Choices(texts=["a", "b"])), ""),
    ("structural tag", constrained(structural_tag=STRUCTURAL_TAG), "structural_tag"),
    ("LoRA adapter", asked(adapter="a"), "adapters"),
    ("cache salt", asked(cache_salt="s"), ""),
    ("priority", asked(priority=1), ""),
    ("parameters of a KV hand-over", asked(kv_transfer=engine_pb2.KvTransferParameters(connector="c")), "kv_transfer"),
    ("hints to the cache", asked(kv_hints=struct_pb2.Struct()), ""),
    ("`allowed_token_ids`", extra("allowed_token_ids", [1]), ""),
    ("`bad_words`", extra("bad_words", ["a"]), ""),
    ("`thinking_token_budget`", extra("thinking_token_budget", 1), ""),
    ("`session_id`", extra("session_id", "s"), ""),
)

EMBEDDINGS = "embeddings, and then nothing else"
# What a configured engine needs for what it refuses otherwise: the engine's name up to a comma, and the row.
CONDITIONS: Mapping[tuple[str, str], str] = {
    ("`vllm`", EMBEDDINGS): "a pooling model, or `runner: pooling`",
    ("`llamacpp`", EMBEDDINGS): "`embeddings`",
    ("`sim`", EMBEDDINGS): "`embeddingDimensions`",
    ("`vllm`", "LoRA adapter"): "`enable-lora`",
    ("`vllm`", "loading and unloading adapters"): "`enable-lora`",
    ("`vllm`", "parameters of a KV hand-over"): "in a `prefill` or `decode` pool",
    ("`sim`", "parameters of a KV hand-over"): "in a `prefill` or `decode` pool",
    ("`vllm`", "pinning to one of several ranks"): "`data-parallel-size`",
    ("`attached`", "LoRA adapter"): "those that the server lists",
    ("`attached`", "cache salt"): "where the server refuses an empty one",
    ("`attached`", "priority"): "`scheduling-policy: priority`",
    ("`attached`", "pinning to one of several ranks"): "where the server refuses a rank that is none",
    ("`attached`", "account of the cache"): "the server's `--kv-events-config`",
}

HEAD = """# What each engine can do

<!-- Written by scripts/engines_page.py from what the engines refuse and say; `./task lint` checks it. -->

A request that needs what an engine cannot do is refused with `UNSUPPORTED_FIELD` and the name of the field, by the
router where `Capabilities` say it and else by the engine; nothing is dropped. `vllm` and `llamacpp` run inside a worker
([vLLM](../guides/vllm.md)); `attached` is a vLLM server that runs already, asked by `/inference/v1/generate` or by
`/v1/completions` ([guide](../guides/attach.md)).

"""

TAIL = """
An engine whose queue knows no priorities takes a priority as a wish without effect, except an attached server, which
would not say so. The simulated engine draws no tokens, so that what only changes the draw has no effect there. An
engine that makes one choice gets a request for each. Edges refuse images for all of them.

Emptying the cache (`ResetCache`) works with all of them; with an attached server where it was started with
`VLLM_SERVER_DEV_MODE=1`.
"""


def cell(mode: Mode, row: str, *, bare: bool, configured: bool, used: set[tuple[str, str]]) -> str:
    """Yes, no, or what it takes."""
    if bare == configured:
        return "yes" if configured else "no"
    key = (mode.name.partition(",")[0], row)
    used.add(key)
    return CONDITIONS.get(key, "?")


def page(problems: list[str]) -> str:
    """The page; what does not fit together is added to the problems."""
    used: set[tuple[str, str]] = set()
    lines = [f"| | {' | '.join(mode.name for mode in MODES)} |", "|---" * (len(MODES) + 1) + "|"]

    def add(row: str, can: Callable[[Mode, bool], bool]) -> None:
        cells = [cell(mode, row, bare=can(mode, False), configured=can(mode, True), used=used) for mode in MODES]
        lines.append(f"| {row} | {' | '.join(cells)} |")

    add("account of the cache", lambda mode, full: mode.capabilities(full)["kv_events"])
    add("pinning to one of several ranks", lambda mode, full: mode.ranks(full) > 1)
    for row, request, capability in ROWS:
        add(row, lambda mode, full, request=request: mode.refusal(request, full) is None)  # type: ignore[misc]
        for mode in MODES:
            for is_configured in (False, True):
                refusal = mode.refusal(request, is_configured)
                if capability and mode.capabilities(is_configured)[capability] == bool(refusal):
                    problems.append(f"{mode.name}: says {capability} otherwise than it does: {refusal or 'taken'}")
    add("loading and unloading adapters", lambda mode, full: mode.loads_adapters(full))
    add(EMBEDDINGS, lambda mode, full: full and mode.embeds())
    add("images", lambda mode, full: mode.capabilities(full).get("images", False))
    problems += [f"{engine}: {row}: no condition is named" for engine, row in used - set(CONDITIONS)]
    problems += [f"{engine}: {row}: needs no condition" for engine, row in set(CONDITIONS) - used]
    return HEAD + "\n".join(lines) + "\n" + TAIL


def main() -> int:
    """Writes or checks, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    is_check = parser.parse_args().check
    problems: list[str] = []
    current = page(problems)
    if not is_check:
        PAGE.write_text(current)
    elif not PAGE.exists() or PAGE.read_text() != current:
        problems.append(f"{PAGE.relative_to(ROOT)}: not current; run `python scripts/engines_page.py`")
    for problem in problems:
        print(problem)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
