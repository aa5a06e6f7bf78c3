"""The Rust core as Python sees it, against a plain Python oracle."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist import _core

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=80)


@given(tokens=TOKENS, other=TOKENS, block=st.integers(1, 9))
def test_equal_hashes_mean_equal_prefixes(tokens: list[int], other: list[int], block: int) -> None:
    left = _core.block_hashes(1, "model", "", "", tokens, block)
    right = _core.block_hashes(1, "model", "", "", tokens[: len(tokens) // 2] + other, block)
    joined = tokens[: len(tokens) // 2] + other
    assert len(tokens) // block == len(left)
    for position in range(min(len(left), len(right))):
        end = (position + 1) * block
        assert (tokens[:end] == joined[:end]) == (left[position] == right[position])


@given(tokens=st.integers(0, 10_000), block=st.integers(1, 64))
def test_a_hit_never_covers_the_last_token(tokens: int, block: int) -> None:
    assert max(0, tokens - 1) // block == _core.usable_blocks(tokens, block)


def test_the_catalogue_is_documented() -> None:
    pages = {
        path.stem for path in (Path(__file__).parents[2] / "docs" / "errors").glob("[A-Z]*.md") if path.stem != "README"
    }
    assert pages == {entry["code"] for entry in json.loads(_core.error_catalogue())}


@given(floor=st.integers(0, 2**63))
def test_an_incarnation_is_above_its_floor(floor: int) -> None:
    assert _core.new_incarnation(floor) > floor


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(_core.CoreError) as caught:
        _core.block_hashes(1, "model", "", "", [1], 0)
    assert caught.value.args[0] == "INVALID_ARGUMENT"


def test_a_closed_runtime_takes_nothing() -> None:
    runtime = _core.Runtime(1)
    runtime.close()
    runtime.close()
    with pytest.raises(_core.CoreError) as caught:
        _core.Relay(runtime, '{"nats_url": "nats://127.0.0.1:1", "cluster": "c"}')
    assert caught.value.args[0] == "DRAINING"


@pytest.mark.parametrize("settings", ["", "{}", '{"nats_url": "x", "cluster": "c", "typo": 1}'])
def test_settings_of_the_core_are_checked(settings: str) -> None:
    runtime = _core.Runtime(1)
    for kind in (_core.Relay, _core.IndexService):
        with pytest.raises(_core.CoreError) as caught:
            kind(runtime, settings)
        assert caught.value.args[0] == "INVALID_ARGUMENT"
    runtime.close()
