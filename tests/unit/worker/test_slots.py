"""The account of slots, against an engine that says everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvist_worker.engines.llamacpp.slots import Scope, Slot, choose, common_prefix_tokens

SIZE = 3
BASE, SALTED = Scope(), Scope(cache_salt="x")
sequences = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)


def hashes(tokens: tuple[int, ...], scope: Scope) -> list[int]:
    """Names of the whole blocks: equal for equal prefixes of equal scope."""
    return [hash((scope, tokens[: end + SIZE])) for end in range(0, len(tokens) // SIZE * SIZE, SIZE)]


@given(sequences, sequences)
def test_the_common_prefix_is_that_of_a_loop(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_prefix_tokens(left, right) == expected


requests = st.tuples(
    sequences,
    st.lists(st.integers(0, 1), max_size=5).map(tuple),
    st.sampled_from((BASE, BASE, SALTED)),
    st.sampled_from(("end", "end", "prefill aborted", "forgotten")),
    st.integers(0, 14),
)


@given(st.lists(requests, max_size=12))
def test_every_claim_is_true_and_an_undisturbed_account_is_exact(script: list) -> None:
    slots = [Slot(index, SIZE) for index in range(2)]
    # What each slot of the engine really holds, and of which scope.
    real: list[tuple[Scope, tuple[int, ...]]] = [(BASE, ())] * 2
    ledger: list[int] = []

    def is_true() -> bool:
        held = [block for scope, tokens in real for block in hashes(tokens, scope)]
        return all(ledger.count(block) <= held.count(block) for block in ledger)

    for clock, (prompt, answer, scope, end, computed) in enumerate(script):
        slot = choose(slots, prompt, scope)
        assert slot is not None
        slot.last_used = clock
        placement = slot.place(prompt, scope)
        for block in placement.removed:
            ledger.remove(block)
        # The engine: it may look at what is there only where the account lets it.
        before = real[slot.index][1] if placement.may_reuse else ()
        cached = min(common_prefix_tokens(before, prompt), len(prompt) - 1)
        assert cached >= placement.cached_tokens
        assert cached == 0 or real[slot.index][0] == scope
        real[slot.index] = (scope, prompt[:cached])
        assert is_true()
        if end == "prefill aborted":
            known = prompt[: max(computed, cached)]
            real[slot.index] = (scope, known)
        else:
            known = (*prompt, *answer[:-1])
            real[slot.index] = (scope, (*prompt, *answer))
        run = slot.grow(known, hashes(known, scope))
        if run is not None:
            assert run.parent is None or run.parent in ledger
            assert len(run.tokens) == SIZE * len(run.hashes)
            ledger.extend(run.hashes)
        assert is_true()
        if end == "forgotten":
            for block in slot.forget():
                ledger.remove(block)
            assert slot.cached_tokens(prompt, scope) == 0
        assert sorted(ledger) == sorted(block for held in slots for block in held.hashes)


def test_the_fullest_slot_is_chosen_and_else_the_one_used_longest_ago() -> None:
    one, two, three = (Slot(index, SIZE, last_used=used) for index, used in enumerate((3, 1, 2)))
    one.grow((1, 2, 3, 4), hashes((1, 2, 3, 4), BASE))
    assert choose([one, two, three], (1, 2, 3, 9), BASE) is one
    assert choose([one, two, three], (1, 2, 3, 9), SALTED) is two
    # Less than a block in common: a new conversation, which must not drive the old one out.
    assert choose([one, two, three], (1, 2, 9), BASE) is two
    assert choose([one, three], (7,), BASE) is three
    assert choose([], (7,), BASE) is None


def test_the_last_token_is_never_found() -> None:
    slot = Slot(0, SIZE)
    prompt = (1, 2, 3)
    slot.grow(prompt, hashes(prompt, BASE))
    placement = slot.place(prompt, BASE)
    assert (placement.cached_tokens, placement.claimed_blocks) == (2, 0)
    assert placement.removed == tuple(hashes(prompt, BASE))


def test_a_correction_takes_back_what_was_not_there() -> None:
    slot = Slot(0, SIZE)
    tokens = tuple(range(9))
    blocks = hashes(tokens, BASE)
    slot.grow(tokens, blocks)
    assert slot.correct(5) == tuple(blocks[1:])
    run = slot.grow(tokens, blocks)
    assert run is not None
    assert (run.parent, run.hashes, run.tokens) == (blocks[0], tuple(blocks[1:]), tokens[3:])
