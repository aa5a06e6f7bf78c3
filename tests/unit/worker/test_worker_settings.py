"""What a worker is told, and how wrong things are answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvist.errors import KvistError
from kvist_worker import engines
from kvist_worker.__main__ import EXIT_FAILED, EXIT_OK, EXIT_USAGE, main
from kvist_worker.settings import WorkerSettings


def test_arguments_of_the_simulated_engine_reach_the_core_as_integers() -> None:
    settings = WorkerSettings(engine="sim", engine_arguments={"blocks": 64.0, "prefillTokensPerSecond": 1.5})
    core = json.loads(settings.core_json())
    assert core["sim"] == {"blocks": 64, "prefillTokensPerSecond": 1.5}
    assert isinstance(core["sim"]["blocks"], int)
    assert "engine_arguments" not in core
    assert "sim" not in json.loads(WorkerSettings(engine="llamacpp").core_json())


def test_an_engine_is_made_by_name() -> None:
    assert engines.create("sim", {}) is None
    with pytest.raises(KvistError) as caught:
        engines.create("vllm", {})
    assert caught.value.code == "NOT_IMPLEMENTED"
    with pytest.raises(KvistError) as caught:
        engines.create("other", {})
    assert caught.value.code == "INVALID_ARGUMENT"


def test_wrong_arguments_are_all_named() -> None:
    pytest.importorskip("xllamacpp")
    with pytest.raises(KvistError) as caught:
        engines.create("llamacpp", {"slots": 0, "slotz": 1})
    assert caught.value.code == "INVALID_ARGUMENT"
    assert {item.field for item in caught.value.fields} == {"engine_arguments.slots", "engine_arguments.slotz"}
    with pytest.raises(KvistError) as caught:
        engines.create("llamacpp", {"modelPath": "/nowhere.gguf"})
    assert [item.field for item in caught.value.fields] == ["engine_arguments.modelPath"]


def test_exit_codes_tell_usage_from_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"worker_uid": "w-1", "engine_arguments": {}}))
    assert main(["--settings-file", str(path), "--check"]) == EXIT_OK
    path.write_text(json.dumps({"worker_uid": "W", "modle": "m"}))
    assert main(["--settings-file", str(path)]) == EXIT_USAGE
    problems = capsys.readouterr().err
    assert "worker_uid" in problems
    assert "did you mean 'model'?" in problems
    assert EXIT_FAILED not in {EXIT_OK, EXIT_USAGE}
