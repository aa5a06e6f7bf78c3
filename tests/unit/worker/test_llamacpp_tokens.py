"""Token ids out of chunks that hold tokens back, against a stream made of known tokens."""

from __future__ import annotations

import codecs

from hypothesis import example, given
from hypothesis import strategies as st

from kvist_worker.engines.llamacpp.tokens import TokenBytes

EMOJI = "😀".encode()
# Whole characters, and characters cut in every way.
VOCABULARY = [b"a", b" b", "é".encode(), b"", EMOJI[:1], EMOJI[:2], EMOJI[:3], EMOJI[1:2], EMOJI[2:3], EMOJI[3:]]
VOCABULARY += [EMOJI[2:], "é".encode()[:1], "é".encode()[1:], "漢".encode()[:2], "漢".encode()[2:]]


def chunks(tokens: list[int]) -> list[tuple[str, int, int]]:
    """What llama.cpp sends: (text, last token, tokens); tokens in the middle of a character are held back."""
    sent: list[tuple[str, int, int]] = []
    pending, count = b"", 0
    for token in tokens:
        pending += VOCABULARY[token]
        count += 1
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = decoder.decode(pending)
        if not decoder.getstate()[0]:
            sent.append((text, token, count))
            pending, count = b"", 0
    return sent


@given(st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=12))
# A token without bytes in the middle of a character.
@example([5, 7, 3, 7])
def test_what_is_certain_is_what_was_drawn(tokens: list[int]) -> None:
    vocabulary = TokenBytes(VOCABULARY)
    position = 0
    for text, last, count in chunks(tokens):
        found = vocabulary.resolve(text, last, count)
        drawn = tuple(tokens[position : position + count])
        position += count
        assert found.token_ids[-1] == last
        if found.is_certain:
            assert found.token_ids == drawn
        if "�" not in text and VOCABULARY[last] and b"" not in [VOCABULARY[token] for token in drawn]:
            # Whatever was drawn, the text is right.
            assert b"".join(VOCABULARY[token] for token in found.token_ids).decode() == text


def test_one_way_is_certain_and_two_are_not() -> None:
    vocabulary = TokenBytes(VOCABULARY)
    assert vocabulary.resolve("漢", 14, 2).is_certain
    assert vocabulary.resolve("漢", 14, 2).token_ids == (13, 14)
    # F0 | 9F 98 has no token for its second half; F0 9F | 98 has.
    assert vocabulary.resolve("😀", 9, 3).token_ids == (5, 8, 9)
    doubled = TokenBytes([*VOCABULARY, "漢".encode()[:2]])
    assert not doubled.resolve("漢", 14, 2).is_certain
    # Bytes that were no text are lost.
    assert vocabulary.resolve("�a", 0, 2).token_ids == (0,)
    assert not vocabulary.resolve("�a", 0, 2).is_certain
