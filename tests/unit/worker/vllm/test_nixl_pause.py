"""NIXL's progress thread pauses. Its library is stood in for; `./task test:nixl` runs the real one."""

import importlib
import sys
from types import ModuleType

import pytest

MODULE = "kvist_worker.engines.vllm.nixl_pause"


class Configuration:
    """As NIXL's bindings have it: the value lies in the native object."""

    def __init__(self) -> None:
        self.native = -1

    @property
    def pthrDelay(self) -> int:  # noqa: N802
        return self.native

    @pthrDelay.setter
    def pthrDelay(self, microseconds: int) -> None:  # noqa: N802
        self.native = microseconds


@pytest.mark.parametrize(("told", "expected"), [(0, 1_000), (20, 20)])
def test_no_pause_becomes_a_pause(monkeypatch: pytest.MonkeyPatch, told: int, expected: int) -> None:
    package, api = ModuleType("nixl"), ModuleType("nixl._api")
    bindings = ModuleType("bindings")
    agent = type("nixl_agent", (), {"__module__": "nixl._api"})
    monkeypatch.setattr(bindings, "nixlAgentConfig", Configuration, raising=False)
    monkeypatch.setattr(api, "nixlBind", bindings, raising=False)
    monkeypatch.setattr(api, "nixl_agent", agent, raising=False)
    monkeypatch.setitem(sys.modules, "nixl", package)
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)

    importlib.import_module(MODULE)
    monkeypatch.delitem(sys.modules, MODULE)

    configuration = bindings.nixlAgentConfig()
    configuration.pthrDelay = told
    assert configuration.native == configuration.pthrDelay == expected
