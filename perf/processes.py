"""Child processes of a benchmark: start until ready, CPU time to the nanosecond, memory, end."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import psutil

START_TIME_LIMIT_SECONDS = 30.0
STOP_TIME_LIMIT_SECONDS = 10.0
POLL_SECONDS = 0.02
# The clock of another process's CPU time, as clock_getcpuclockid(3) makes it on Linux.
_CPU_CLOCK_OF_PROCESS = 2


class ProcessFailedError(Exception):
    """A child ended by itself or did not become ready; the message holds the end of its log."""


class Process:
    """One child. Its output goes to a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        folder: Path,
        cores: AbstractSet[int] = frozenset(),
        ready_path: Callable[[int], Path] | None = None,
        is_announced: bool = True,
    ) -> None:
        """A process that has not started.

        Args:
            name: Name of its log and of its ready file.
            command: Program and arguments, in which `{ready}` stands for the path of the ready file.
            folder: Where its files go.
            cores: Where it may run; empty for anywhere.
            ready_path: Ready file by process id, for programs that name it themselves.
            is_announced: Whether it writes a ready file at all; whoever starts one that does not asks it.
        """
        self.name = name
        self._cores = cores
        own_path = folder / f"{name}.ready.json"
        self._ready_path = ready_path or (lambda _process_id: own_path)
        self._is_announced = is_announced
        self._command = [part.replace("{ready}", str(own_path)) for part in command]
        self._log_path = folder / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process_id(self) -> int:
        """Process id."""
        if self._process is None:
            raise ProcessFailedError(f"{self.name} was not started")
        return self._process.pid

    async def start(self) -> dict[str, Any]:
        """Starts it and returns what it wrote into its ready file; nothing when it writes none.

        Raises:
            ProcessFailedError: It ended, or was not ready in time.
        """
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C reaches the benchmark alone, which ends its children in order.
                start_new_session=True,
            )
        if self._cores:
            # Its threads inherit this: Python has not got as far as starting one.
            os.sched_setaffinity(self.process_id, self._cores)
        if not self._is_announced:
            return {}
        path = self._ready_path(self.process_id)
        deadline = time.monotonic() + START_TIME_LIMIT_SECONDS
        while (announced := _read(path)) is None:
            self.check()
            if time.monotonic() > deadline:
                raise ProcessFailedError(f"{self.name} was not ready in time\n{self.log_tail()}")
            await asyncio.sleep(POLL_SECONDS)
        return announced

    def check(self) -> None:
        """Sees to it that it still runs.

        Raises:
            ProcessFailedError: It does not.
        """
        if self._process is not None and self._process.returncode is not None:
            raise ProcessFailedError(f"{self.name} ended with code {self._process.returncode}\n{self.log_tail()}")

    def cpu_seconds(self) -> float:
        """CPU time of all its threads so far, user and system."""
        return time.clock_gettime((~self.process_id << 3) | _CPU_CLOCK_OF_PROCESS)

    def user_and_system_seconds(self) -> tuple[float, float]:
        """The same in two parts, as coarse as the kernel's ticks."""
        times = psutil.Process(self.process_id).cpu_times()
        return times.user, times.system

    def resident_bytes(self) -> int:
        """Memory that it holds at the moment."""
        resident: int = psutil.Process(self.process_id).memory_info().rss
        return resident

    async def stop(self) -> None:
        """Asks it to end, and ends it when it does not in time."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIME_LIMIT_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def log_tail(self) -> str:
        """The last lines of its output."""
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-10:])


def _read(path: Path) -> dict[str, Any] | None:
    """What a ready file holds; none while it is not there or is being written."""
    try:
        announced: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return announced
