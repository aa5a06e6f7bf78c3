"""The account of an engine whose cache is a fixed number of slots, each the KV of one token sequence.

Pure: it takes what is known of the engine and returns what to tell the ledger. A slot's `tokens` are those whose KV is
certainly there; there may be more. Each slot counts as one copy of each of its blocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Scope:
    """Only requests of equal scope share KV.

    Attributes:
        adapter: LoRA adapter; empty for the base model.
        cache_salt: Secret that separates caches; empty for the shared one.
    """

    adapter: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Blocks to tell the ledger of.

    Attributes:
        hashes: In prompt order.
        parent: The block before the first; none when the first starts a prompt.
        tokens: Of all the blocks.
    """

    hashes: tuple[int, ...]
    parent: int | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """What placing a prompt in a slot means.

    Attributes:
        cached_tokens: Leading tokens whose KV is certainly there and stays.
        claimed_blocks: Whole blocks of them.
        removed: Blocks that the engine is about to overwrite.
        may_reuse: Whether the engine may look at what the slot holds.
    """

    cached_tokens: int
    claimed_blocks: int
    removed: tuple[int, ...]
    may_reuse: bool


def common_prefix_tokens(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(left), len(right))
    # Comparing slices runs in C; halving keeps the sum of their lengths below twice the prefix.
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(slots=True)
class Slot:
    """One slot.

    Attributes:
        index: Which.
        block_size_tokens: Tokens a block.
        scope: Of what it holds.
        tokens: Tokens whose KV is certainly there.
        hashes: The blocks that the ledger was told of, in order: a prefix of those of `tokens`.
        is_known: False when what lies there must not be used.
        last_used: Order of use.
    """

    index: int
    block_size_tokens: int
    scope: Scope = field(default_factory=Scope)
    tokens: tuple[int, ...] = ()
    hashes: list[int] = field(default_factory=list)
    is_known: bool = True
    last_used: int = 0

    def cached_tokens(self, prompt: tuple[int, ...], scope: Scope) -> int:
        """Leading tokens of a prompt that it would find here. The last one is always computed."""
        if not self.is_known or scope != self.scope:
            return 0
        return min(common_prefix_tokens(self.tokens, prompt), len(prompt) - 1)

    def place(self, prompt: tuple[int, ...], scope: Scope) -> Placement:
        """The engine is about to work on a prompt: what lies beyond the common prefix goes."""
        cached = self.cached_tokens(prompt, scope)
        may_reuse = self.is_known and scope == self.scope
        removed = self._keep(cached)
        self.scope = scope
        self.is_known = True
        return Placement(cached, cached // self.block_size_tokens, removed, may_reuse)

    def correct(self, cached_tokens: int) -> tuple[int, ...]:
        """The engine found fewer tokens than were thought to be there; returns the blocks to take back."""
        return self._keep(min(cached_tokens, len(self.tokens)))

    def grow(self, tokens: tuple[int, ...], hashes: Sequence[int]) -> StoredRun | None:
        """The KV of these tokens is certainly there; `hashes` are those of their whole blocks."""
        size = self.block_size_tokens
        told = len(self.hashes)
        whole = len(tokens) // size
        self.tokens = tokens
        if whole <= told:
            return None
        run = StoredRun(
            hashes=tuple(hashes[told:whole]),
            parent=self.hashes[-1] if self.hashes else None,
            tokens=tokens[told * size : whole * size],
        )
        self.hashes.extend(run.hashes)
        return run

    def forget(self) -> tuple[int, ...]:
        """Nothing is known of what lies there; returns the blocks to take back."""
        removed = self._keep(0)
        self.is_known = False
        return removed

    def _keep(self, tokens: int) -> tuple[int, ...]:
        blocks = tokens // self.block_size_tokens
        removed = tuple(self.hashes[blocks:])
        del self.hashes[blocks:]
        self.tokens = self.tokens[:tokens]
        return removed


def choose(idle: Iterable[Slot], prompt: tuple[int, ...], scope: Scope) -> Slot | None:
    """The idle slot that holds most whole blocks of a prompt; of equal ones the one that was used longest ago.

    Whole blocks are what the ledger claims, so a prompt finds what was claimed of the idle slots. Less than a block is
    not worth a slot: conversations that share a short beginning would all take the same one and drive each other out.
    """

    def worth(slot: Slot) -> tuple[int, int]:
        return (slot.cached_tokens(prompt, scope) // slot.block_size_tokens, -slot.last_used)

    return max(idle, key=worth, default=None)
