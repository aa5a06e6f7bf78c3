"""A wall clock that a test turns, for one process: libfaketime before its C library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import libfaketime


class FakeClock:
    """The clock of a process that is started with `environment`. Clocks that only go forward are left as they are.

    Args:
        file: Says how far the clock is off; the process reads it at each look at its clock.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.turn(seconds=0)

    @property
    def environment(self) -> Mapping[str, str]:
        library = Path(libfaketime.__file__).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"
        return {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def turn(self, *, seconds: int) -> None:
        """From here on the clock is off by so much."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.replace(self._file)
