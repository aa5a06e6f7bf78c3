"""Cluster states on disk: the last good one of a router, and the static one of a router without controllers."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from google.protobuf import json_format

from kvist.atomic_file import write_atomically
from kvist.controller.v1.controller_pb2 import ClusterState
from kvist.telemetry import logger

POLL_SECONDS = 0.5

_log = logger(__name__)


def read_state(path: Path) -> ClusterState:
    """Reads a cluster state.

    Raises:
        OSError: The file cannot be read.
        ValueError: It holds no cluster state.
    """
    try:
        return json_format.Parse(path.read_text(), ClusterState())
    except json_format.ParseError as error:
        raise ValueError(f"{path} holds no ClusterState: {error}") from error


def write_state(path: Path, state: ClusterState) -> None:
    """Replaces a cluster state so that a reader sees the old or the new one, never a part."""
    write_atomically(path, json_format.MessageToJson(state))


class StaticState:
    """A cluster state that people write. Each change of the file is a newer version, whatever it says of itself."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._changes = 0

    async def follow(self, on_state: Callable[[ClusterState], Awaitable[None]]) -> None:
        """Hands on the state, then each changed one, for ever. A wrong file is logged and the last good state stays."""
        while True:
            state = self.poll()
            if state is not None:
                await on_state(state)
            await asyncio.sleep(POLL_SECONDS)

    def poll(self) -> ClusterState | None:
        """The state when the file has changed since the last call, else none."""
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            state = read_state(self._path)
        except (OSError, ValueError) as error:
            _log.error("cluster_state_file_wrong", reason=str(error))
            return None
        self._changes += 1
        state.version.revision += self._changes
        return state
