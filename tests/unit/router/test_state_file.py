"""Cluster states on disk."""

from pathlib import Path

import pytest

from kvist.controller.v1.controller_pb2 import ClusterState, ClusterVersion, Model
from kvist_router.state_file import StaticState, read_state, write_state


def state(*names: str, revision: int = 0) -> ClusterState:
    return ClusterState(
        version=ClusterVersion(store_epoch=3, revision=revision),
        cluster="c",
        hash_seed=2**64 - 1,
        models=[Model(name=name) for name in names],
    )


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_state(path, state("a", revision=9))
    assert read_state(path) == state("a", revision=9)
    assert [found.name for found in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("content", ["", "{", '{"modelz": []}', '"x"'])
def test_a_damaged_state_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="holds no ClusterState"):
        read_state(path)


def test_each_change_of_a_static_file_is_a_newer_version_and_a_wrong_one_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    static = StaticState(path)
    assert static.poll() is None
    write_state(path, state("a"))
    assert static.poll() == state("a", revision=1)
    assert static.poll() is None
    path.write_text("{")
    assert static.poll() is None
    write_state(path, state("a", "b"))
    assert static.poll() == state("a", "b", revision=2)
