"""What the node is and how loaded it is."""

import importlib.util
import platform
import socket
from collections.abc import Mapping, Sequence

import psutil

import kvist
from kvist import engines as engine_environments
from kvist.agent.v1.agent_pb2 import NodeInventory, NodeLoad

# Engine adapter → module that it cannot do without. Those of the core need none.
_MODULES_BY_ENGINE: Mapping[str, str] = {"llamacpp": "xllamacpp"}


def installed_engines() -> list[str]:
    """Engine adapters that can start here: those of this environment, and those with one of their own."""
    here = [engine for engine, module in _MODULES_BY_ENGINE.items() if importlib.util.find_spec(module)]
    return sorted({"attached", "sim", *here, *engine_environments.installed()})


def read_inventory(*, node_uid: str, name: str, labels: Mapping[str, str], engines: Sequence[str]) -> NodeInventory:
    """What the node is."""
    return NodeInventory(
        node_uid=node_uid,
        name=name or socket.gethostname(),
        processors=psutil.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        agent_version=kvist.__version__,
        labels=dict(labels),
        engines=list(engines) or installed_engines(),
    )


def read_load() -> NodeLoad:
    """How loaded the node is, since the last reading."""
    load = NodeLoad(
        processor_ratio=psutil.cpu_percent(interval=None) / 100,
        available_memory_bytes=psutil.virtual_memory().available,
    )
    load.measured_at.GetCurrentTime()
    return load
