"""What is known of a vLLM engine that is up. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvist_worker.engine import EngineCapabilities, KvLayout


@dataclass(frozen=True, slots=True)
class EventSockets:
    """Where a rank publishes its KV events.

    Attributes:
        endpoint: PUB socket.
        replay_endpoint: ROUTER socket.
    """

    endpoint: str
    replay_endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What is known of an engine that is up.

    Attributes:
        version: Of vLLM.
        context_tokens: Prompt and completion together.
        max_running_requests: Requests in a batch.
        max_top_logprobs: Most alternatives for each token.
        vocabulary_size: Token ids are below this.
        block_size_tokens: Tokens a block.
        kv_blocks: Blocks of one rank.
        ranks: Data-parallel ranks.
        hash_algorithm: How it names its blocks.
        event_sockets: By rank; empty when it caches no prefixes.
        orders_by_priority: Whether the scheduler looks at priorities.
        embeds: Whether its model makes embeddings, and generates nothing.
        kv_layout: How its KV lies and by which connector it is handed over; none without one.
        takes_adapters: Whether LoRA is on.
        is_traced: Whether vLLM exports spans of its own.
        tokenizer_json: `tokenizer.json`; none for a tokenizer of another kind.
        chat_template: Jinja template; empty when there is none.
        bos_token: Text of the token that begins a sequence; empty when none.
        eos_token: Text of the token that ends a sequence; empty when none.
        add_bos: Whether plain prompts get the beginning token in front.
        eos_token_ids: Tokens that end generation.
    """

    version: str
    context_tokens: int
    max_running_requests: int
    max_top_logprobs: int
    vocabulary_size: int
    block_size_tokens: int
    kv_blocks: int
    ranks: int
    hash_algorithm: str
    event_sockets: Mapping[int, EventSockets]
    orders_by_priority: bool
    embeds: bool
    kv_layout: KvLayout | None
    takes_adapters: bool
    is_traced: bool
    tokenizer_json: bytes | None
    chat_template: str
    bos_token: str
    eos_token: str
    add_bos: bool
    eos_token_ids: tuple[int, ...]

    @property
    def capabilities(self) -> EngineCapabilities:
        """What the engine can do."""
        if self.embeds:
            return EngineCapabilities(embeddings=True)
        return EngineCapabilities(
            logprobs=True,
            json_schema=True,
            grammar=True,
            regex=True,
            structural_tag=True,
            adapters=self.takes_adapters,
            kv_events=bool(self.event_sockets),
            kv_transfer=self.kv_layout is not None,
        )
