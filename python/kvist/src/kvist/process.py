"""What every process of Kvist does alike: say where it listens, and end on a signal."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ReadyFile:
    """A file by which a process says that it listens, and where, without fixed ports."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, content: dict[str, Any]) -> None:
        """Writes the file at once, so that a reader sees all of it or nothing. Without a path, prints it."""
        text = json.dumps(content)
        if self._path is None:
            os.write(1, f"{text}\n".encode())
            return
        write_atomically(self._path, text)


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def wait_for_signal(*, time_limit_seconds: float | None = None) -> bool:
    """Waits for SIGTERM or SIGINT; returns false when the time is over first.

    The signals stay blocked, so that one that arrives between two waits is not lost.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    if time_limit_seconds is None:
        signal.sigwait(STOP_SIGNALS)
        return True
    return signal.sigtimedwait(STOP_SIGNALS, time_limit_seconds) is not None
