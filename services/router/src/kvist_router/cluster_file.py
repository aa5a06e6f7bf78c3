"""Cluster state from a file instead of from controllers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from google.protobuf import json_format
from kvist import _core
from kvist.controller.v1 import controller_pb2


class ClusterFile:
    """A file with `kvist.controller.v1.ClusterState` as protobuf JSON, looked at from time to time.

    A file that cannot be read, or a state that is wrong, is reported once and ignored: the last good state stays.
    """

    POLL_SECONDS = 0.1

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None

    def apply_if_changed(self, apply: Callable[[bytes], bool]) -> bool:
        """Hands a changed file over; returns whether it was taken in."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return False
        seen = (status.st_mtime_ns, status.st_ino)
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            state = json_format.Parse(self._path.read_text(), controller_pb2.ClusterState())
            return apply(state.SerializeToString())
        except (json_format.ParseError, UnicodeDecodeError, _core.CoreError) as error:
            sys.stderr.write(f"kvist_router: cluster file ignored, the last good state stays: {error}\n")
            return False
