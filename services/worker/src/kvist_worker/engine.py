"""What an engine adapter is to the worker, and what the worker is to an adapter.

The server in the core calls the adapter from threads of its own; no call may block for longer than it takes to note
something down. Events of a request go to its sink, changes of the cache and of the load to the host. Sink and host may
be used from any thread.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine can do.

    Attributes:
        logprobs: Log-probabilities of generated tokens.
        json_schema: Output constrained by a JSON schema.
        grammar: Output constrained by a grammar.
        regex: Output constrained by a regular expression.
        structural_tag: Free text in which what follows a trigger keeps to a schema.
        embeddings: It was started for embeddings, and generates nothing.
        adapters: LoRA adapters.
        kv_transfer: Hand-over of KV between engines.
        kv_events: The cache is accounted for, block by block.
    """

    logprobs: bool = False
    json_schema: bool = False
    grammar: bool = False
    regex: bool = False
    structural_tag: bool = False
    embeddings: bool = False
    adapters: bool = False
    kv_transfer: bool = False
    kv_events: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """What two engines must agree on to hand KV to each other.

    Attributes:
        connector: What moves it.
        tensor_parallel_size: Devices over which each layer is divided.
        prefill_context_parallel_size: Devices that share the context while a prompt is computed.
        decode_context_parallel_size: Devices that share the context while tokens are generated.
    """

    connector: str
    tensor_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What an engine is; constant from before its start.

    Attributes:
        engine: Name of the adapter.
        version: Version of the engine.
        context_tokens: Prompt and completion together.
        max_running_requests: Requests that run at once.
        max_waiting_requests: Requests that may wait.
        max_top_logprobs: Most alternatives for each token.
        kv_blocks: Blocks of the cache; 0 when unknown.
        block_size_tokens: Tokens a block.
        ranks: Data-parallel ranks.
        makes_choices: It makes several choices of one request by itself; another engine gets one request for each.
        hash_algorithm: How the engine itself names its blocks; empty when it does not say.
        capabilities: What it can do.
        chat_template: Jinja template; empty when there is none.
        bos_token: Text of the token that begins a sequence; empty when none.
        eos_token: Text of the token that ends a sequence; empty when none.
        add_bos: Whether plain prompts get the beginning token in front.
        eos_token_ids: Tokens that end generation.
        kv_layout: How its KV lies and is handed over; none for an engine that hands nothing over.
    """

    engine: str
    version: str
    context_tokens: int
    max_running_requests: int
    max_waiting_requests: int
    max_top_logprobs: int
    kv_blocks: int
    block_size_tokens: int
    ranks: int = 1
    makes_choices: bool = False
    hash_algorithm: str = ""
    capabilities: EngineCapabilities = field(default_factory=EngineCapabilities)
    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""
    add_bos: bool = False
    eos_token_ids: tuple[int, ...] = ()
    kv_layout: KvLayout | None = None

    def to_json(self) -> str:
        """The form the core reads."""
        return json.dumps(asdict(self))


class EngineHost(Protocol):
    """The ledger and the load of a worker."""

    def block_hashes(self, tokens: list[int], *, adapter: str = "", cache_salt: str = "") -> list[int]:
        """Hashes of a prompt's whole blocks, as the ledger names them."""

    def stored(
        self,
        rank: int,
        engine_hashes: list[int],
        parent: int | None,
        tokens: list[int],
        *,
        adapter: str = "",
        cache_salt: str = "",
    ) -> None:
        """Blocks are in the cache from here on, each the parent of the next; `tokens` are those of all of them."""

    def removed(self, rank: int, engine_hashes: list[int]) -> None:
        """One copy of each of these blocks has left the cache. Said before their memory is used for something else."""

    def cleared(self, rank: int) -> None:
        """The cache of a rank is empty."""

    def follow_vllm(self, rank: int, settings_json: str) -> None:
        """Feeds a rank's ledger from the sockets on which the engine publishes its KV events. Only within `start`."""

    def clear_ordered(self) -> int:
        """The engine is about to empty its cache and will say so late; returns how many blocks were claimed."""

    def cache_unknown(self) -> None:
        """Nothing is known of what the engine holds."""

    def claimed_blocks(self, rank: int, block_hashes: list[int]) -> int:
        """Leading blocks of a prompt that the ledger claims."""

    def report_load(self, report: bytes) -> None:
        """Replaces the load report: an encoded `kvist.events.v1.LoadReport`, numbered by the worker."""

    def failed(self, reason: str) -> None:
        """The engine is broken for good. The reason is for the log."""


class RequestSink(Protocol):
    """Where the events of one request go; exactly one `finished` or `failed` ends it."""

    def tokens(
        self,
        token_ids: list[int],
        logprobs: bytes | None = None,
        cached_tokens: int | None = None,
        choice: int = 0,
    ) -> None:
        """New tokens of a choice. `logprobs` is an encoded `TokenDelta` of which only those are read."""

    def finished(self, finished: bytes, prompt_logprobs: bytes | None = None) -> None:
        """The engine ended the request: an encoded `kvist.engine.v1.Finished`.

        `prompt_logprobs` is an encoded `TokenDelta` whose log-probabilities are those of the prompt.
        """

    def failed(
        self,
        code: str,
        message: str,
        *,
        not_started: bool = False,
        retry_after_ms: int | None = None,
        fields: list[tuple[str, str]] = ...,
    ) -> None:
        """The request failed, with a code of the catalogue, a public text, and (path, why) of each wrong field."""


class EmbedSink(Protocol):
    """Where the embeddings of one call go; exactly one `finished` or `failed` ends it."""

    def finished(self, response: bytes) -> None:
        """An encoded `EmbedResponse`, one embedding for each input in order."""

    def failed(
        self,
        code: str,
        message: str,
        *,
        not_started: bool = False,
        retry_after_ms: int | None = None,
        fields: list[tuple[str, str]] = ...,
    ) -> None:
        """The call failed, with a code of the catalogue, a public text, and (path, why) of each wrong field."""

    def is_abandoned(self) -> bool:
        """Whether nobody waits for the embeddings any more."""


class EngineAdapter(Protocol):
    """One engine. The core calls `description` and `tokenizer_json`, then `start`, then the rest.

    An engine with LoRA adapters also has `load_adapter(name, path)` and `unload_adapter(name)`, which may take time.
    One that was started for embeddings also has `embed(request: bytes, sink: EmbedSink)`, which takes an encoded
    `EmbedRequest` and never blocks.
    """

    def description(self) -> str:
        """An `EngineDescription` as JSON text."""

    def tokenizer_json(self) -> bytes | None:
        """The `tokenizer.json`; none when the engine has no tokenizer."""

    def start(self, host: EngineHost) -> None:
        """Gets the engine ready for requests. May take as long as a model loads."""

    def submit(self, request: bytes, sink: RequestSink) -> None:
        """Takes an encoded `EngineRequest` whose prompt is token ids."""

    def abort(self, request_id: str, reason: int) -> None:
        """Ends a request, for an `AbortReason`; its sink still gets its end. An unknown id is ignored."""

    def reset_cache(self) -> int:
        """Empties the prefix cache; returns how many blocks that were."""

    def close(self) -> None:
        """Ends everything, running requests included. Idempotent."""
