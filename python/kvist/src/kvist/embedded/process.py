"""One supervised child: started, watched, restarted with back-off, ended with its whole group."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIRST_BACK_OFF_SECONDS = 0.2
LONGEST_BACK_OFF_SECONDS = 10.0
# A child that lived this long starts its back-off anew.
STEADY_SECONDS = 30.0
READY_POLL_SECONDS = 0.05
LOG_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to run a child.

    Attributes:
        name: Name of the process, and of its log file.
        command: Program and arguments, given what the child announced at its first start: empty then, and afterwards
            used to listen at the same addresses again.
        log_path: Where its output goes.
        ready_path: File that the child of a process id writes when it listens, holding a JSON object.
        start_time_limit_seconds: How long it may take to become ready.
        stop_time_limit_seconds: How long it may take to end after SIGTERM.
    """

    name: str
    command: Callable[[Mapping[str, Any]], Sequence[str]]
    log_path: Path
    ready_path: Callable[[int], Path]
    start_time_limit_seconds: float = 30.0
    stop_time_limit_seconds: float = 15.0


class ChildFailedError(Exception):
    """A child ended or stayed silent while it was awaited."""

    def __init__(self, name: str, reason: str, log_tail: str, log_path: Path) -> None:
        super().__init__(f"{name} {reason}")
        self.name = name
        self.reason = reason
        self.log_tail = log_tail
        self.log_path = log_path


class Child:
    """A running child; restarted when it dies until `stop` is called."""

    def __init__(self, spec: ChildSpec, *, on_change: Callable[[], None]) -> None:
        self.spec = spec
        self.restarts = 0
        self.announced: dict[str, Any] = {}
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    @property
    def process_id(self) -> int:
        """Process id; 0 while it does not run."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    async def start(self) -> None:
        """Starts the child and waits until it is ready.

        Raises:
            ChildFailedError: It ended or stayed silent.
        """
        log = self.spec.log_path.open("ab")
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command(self.announced),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A group of its own: Ctrl-C at the terminal reaches the supervisor alone, which ends the rest in order.
                start_new_session=True,
            )
        finally:
            log.close()
        deadline = asyncio.get_running_loop().time() + self.spec.start_time_limit_seconds
        ready_path = self.spec.ready_path(self._process.pid)
        while (announced := read_announcement(ready_path, self._process.pid)) is None:
            if self._process.returncode is not None:
                raise self._failure(f"ended with exit code {self._process.returncode} while starting")
            if asyncio.get_running_loop().time() > deadline:
                raise self._failure(f"was not ready after {self.spec.start_time_limit_seconds:.0f} s")
            await asyncio.sleep(READY_POLL_SECONDS)
        self.announced = announced

    async def keep_alive(self) -> None:
        """Restarts the child whenever it dies; returns after `stop`."""
        back_off_seconds = FIRST_BACK_OFF_SECONDS
        loop = asyncio.get_running_loop()
        while self._process is not None:
            started = loop.time()
            await self._process.wait()
            if self._is_stopping():
                return
            self._on_change()
            if loop.time() - started > STEADY_SECONDS:
                back_off_seconds = FIRST_BACK_OFF_SECONDS
            await asyncio.sleep(back_off_seconds)
            back_off_seconds = min(back_off_seconds * 2, LONGEST_BACK_OFF_SECONDS)
            if self._is_stopping():
                return
            self.restarts += 1
            try:
                await self.start()
            except ChildFailedError:
                self._signal(signal.SIGKILL)
            self._on_change()

    async def stop(self) -> None:
        """Asks the child to end, and ends its group when it does not in time."""
        self._stopping = True
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), self.spec.stop_time_limit_seconds)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._process.wait()

    def _is_stopping(self) -> bool:
        # A call, so that no reader takes the value for unchanged across an `await`.
        return self._stopping

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _failure(self, reason: str) -> ChildFailedError:
        return ChildFailedError(self.spec.name, reason, tail(self.spec.log_path), self.spec.log_path)


def read_announcement(path: Path, process_id: int) -> dict[str, Any] | None:
    """What a process has announced; none before it did, while it writes, or when an earlier process wrote the file."""
    try:
        announced: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return announced if announced.get("process_id", process_id) == process_id else None


def tail(path: Path) -> str:
    """The last lines of a log."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-LOG_TAIL_LINES:])
