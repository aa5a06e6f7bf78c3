"""Engines with environments of their own: where they are, and how they are installed.

An engine such as vLLM brings gigabytes of packages that no other process needs. Its worker runs in an environment that
holds the engine, `kvist` and `kvist-worker`, and nothing else of Kvist.
"""

from kvist.engines.environment import EngineEnvironment, engines_folder, find, installed

__all__ = ["EngineEnvironment", "engines_folder", "find", "installed"]
