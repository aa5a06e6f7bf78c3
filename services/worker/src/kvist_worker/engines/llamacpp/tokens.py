"""The token ids of llama.cpp's stream.

llama.cpp sends a chunk for each token, except that it holds tokens back while they end in the middle of a character;
the chunk that completes it names only its last token. The others follow from the chunk's text and the number of tokens
so far, nearly always in one way. Where they do not, the ids are a guess with the same bytes, and nothing may be claimed
of the cache from there on.

Pure.
"""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkTokens:
    """Tokens of one chunk.

    Attributes:
        token_ids: In order; a token whose bytes are lost is left out.
        is_certain: Whether they are exactly what the engine drew.
    """

    token_ids: tuple[int, ...]
    is_certain: bool


class TokenBytes:
    """The bytes of each token, and the way back."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """Control tokens have none."""
        self._bytes = token_bytes
        by_bytes: dict[bytes, list[int]] = {}
        for token_id, data in enumerate(token_bytes):
            # Only parts of characters are ever held back.
            if data and not _is_text(data):
                by_bytes.setdefault(data, []).append(token_id)
        self._by_bytes: Mapping[bytes, list[int]] = by_bytes
        self._has_silent = any(not data for data in token_bytes)

    def __len__(self) -> int:
        return len(self._bytes)

    def resolve(self, text: str, last_token: int, count: int) -> ChunkTokens:
        """The `count` tokens of a chunk that ends with a known one."""
        if count == 1:
            return ChunkTokens((last_token,), is_certain=True)
        last = self._bytes[last_token]
        data = text.encode(errors="replace")
        # A replacement character stands for bytes that were no text: they are lost.
        if count > 1 and "�" not in text and last and data.endswith(last):
            held = data[: len(data) - len(last)]
            found = self._splits(held, b"", count - 1)
            if found:
                is_certain = len(found) == 1 and not self._may_hide_silent(held, count - 1)
                return ChunkTokens((*found[0], last_token), is_certain=is_certain)
        return ChunkTokens((last_token,), is_certain=False)

    def _may_hide_silent(self, held: bytes, count: int) -> bool:
        """Whether fewer tokens would do, the rest having no bytes: where those stand nobody can tell."""
        return self._has_silent and any(self._splits(held, b"", fewer) for fewer in range(1, count))

    def _splits(self, data: bytes, before: bytes, count: int) -> list[tuple[int, ...]]:
        """At most two ways to write bytes as tokens of which each leaves a character unfinished."""
        if count == 0:
            return [] if data else [()]
        found: list[tuple[int, ...]] = []
        # Longer first tokens are tried first: merges make them the likely ones.
        for length in range(len(data) - count + 1, 0, -1):
            head = data[:length]
            if not _is_unfinished(before + head):
                continue
            for token_id in self._by_bytes.get(head, ()):
                for rest in self._splits(data[length:], before + head, count - 1):
                    found.append((token_id, *rest))
                    if len(found) > 1:
                        return found
        return found


def _is_unfinished(data: bytes) -> bool:
    """Whether bytes end in the middle of a UTF-8 character."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    pending, _ = decoder.getstate()
    return bool(pending)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
