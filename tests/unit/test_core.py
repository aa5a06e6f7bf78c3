"""The Rust core as Python sees it, against a plain Python oracle."""

import ast
import json
from pathlib import Path

import kvist
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
    pages = {path.stem for path in (Path(__file__).parents[2] / "docs" / "errors").glob("*.md")}
    assert pages == {entry["code"] for entry in json.loads(_core.error_catalogue())}


def test_the_stub_file_names_what_the_module_has() -> None:
    stub = ast.parse((Path(kvist.__file__).parent / "_core.pyi").read_text())
    named = {node.name for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert named == {name for name in vars(_core) if not name.startswith("_")}
