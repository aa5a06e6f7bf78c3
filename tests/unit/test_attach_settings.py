"""What an agent may be told of an engine that runs already, and what the core is told of it."""

import json
from pathlib import Path

import pytest

from kvist import _core
from kvist.settings import SettingsError, load
from kvist_agent.attach_settings import AttachSettings
from kvist_agent.attached import attached_uid, core_settings
from kvist_agent.settings import AgentSettings

GOOD = {
    "name": "stock",
    "model": "m",
    "events_endpoint": "tcp://10.0.0.7:5557",
    "replay_endpoint": "tcp://10.0.0.7:5657",
    "block_size_tokens": 16,
}


def problems(*engines: dict[str, object]) -> str:
    with pytest.raises(SettingsError) as failure:
        load(AgentSettings, environment={}, flags={"attach": json.dumps(engines)})
    return str(failure.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": "Stock"}, "attach.0.name"),
        ({"model": ""}, "attach.0.model"),
        ({"events_endpoint": "10.0.0.7:5557"}, "neither tcp://host:port nor ipc://path"),
        ({"events_endpoint": "tcp://*:5557"}, "is what the engine binds: name the host"),
        ({"events_endpoint": "tcp://h:0"}, "must name the port"),
        ({"events_endpoint": "tcp://h"}, "is not host:port"),
        ({"events_endpoint": "ipc://"}, "has no path"),
        ({"events_endpoint": "ipc:///run/e", "ranks": 2}, "must be tcp:// for several ranks"),
        ({"replay_endpoint": "tcp://h:65535", "ranks": 2}, "leaves no ports for all ranks"),
        ({"replay_endpoint": "tcp://10.0.0.7:5557"}, "is the events endpoint"),
        ({"media": {"gpu": "fast"}}, "attach.0.media.gpu"),
        ({"block_size": 16}, "unknown setting"),
    ],
)
def test_what_cannot_be_right_is_refused_by_its_path_and_reason(change: dict[str, object], complaint: str) -> None:
    assert complaint in problems(GOOD | change)


def test_two_engines_of_one_name_are_refused() -> None:
    assert "two engines are called 'stock'" in problems(GOOD, GOOD)


def test_the_core_takes_what_the_settings_allow(tmp_path: Path) -> None:
    engines = [
        AttachSettings(**GOOD, ranks=4, topic="kv", adapters={7: "sql"}, media={"lmcache": "host", "nvme": "hint"}),
        AttachSettings(**GOOD | {"name": "other", "events_endpoint": "ipc:///run/e", "may_repeat": False}),
    ]
    uids = [attached_uid(engine.name, node_uid="node-0a1b2c") for engine in engines]
    assert uids == ["attached-0a1b2c-stock", "attached-0a1b2c-other"]
    told = [core_settings(engine, worker_uid=uid) for engine, uid in zip(engines, uids, strict=True)]
    runtime = _core.Runtime(1)
    try:
        _core.AttachedEngines(runtime, json.dumps({"hash_seed": 1, "folder": str(tmp_path), "engines": told}))
        with pytest.raises(_core.CoreError, match="worker_uid is another engine"):
            twice = {"hash_seed": 1, "folder": str(tmp_path), "engines": [told[0], told[0]]}
            _core.AttachedEngines(runtime, json.dumps(twice))
    finally:
        runtime.close()
