"""Processes that outlive the agent: started in a session of their own, watched by process descriptor.

A process is identified by (process id, start time): ids are used again, and a re-attached worker must be the one that
was started.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

# Used only where the kernel has no process descriptors.
POLL_SECONDS = 0.05
# Start times are read from the kernel's ticks; two readings of the same process are equal up to rounding.
_START_TIME_TOLERANCE_SECONDS = 0.02

# What is killed is gone within this time, unless the kernel holds it in a call.
_KILL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Which process, for good.

    Attributes:
        process_id: Process id.
        started_at_unix_seconds: Start time as the kernel states it.
    """

    process_id: int
    started_at_unix_seconds: float

    def find(self) -> psutil.Process | None:
        """The process, when it is the same one and has not ended."""
        try:
            process = psutil.Process(self.process_id)
            if abs(process.create_time() - self.started_at_unix_seconds) > _START_TIME_TOLERANCE_SECONDS:
                return None
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except psutil.NoSuchProcess:
            return None


def end_left_behind(identity: ProcessIdentity) -> int:
    """Kills what a process that has ended left running in its session, such as the processes of its engine.

    Returns:
        How many there were.
    """
    session = identity.process_id
    if psutil.pid_exists(session):
        # It lives, or its id is another's by now: then nothing of the session is left.
        return 0
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                left.append(process)
    psutil.wait_procs(left, timeout=_KILL_SECONDS)
    return len(left)


class WorkerProcess:
    """One process of a worker, started here or by an earlier agent."""

    def __init__(self, identity: ProcessIdentity, *, child: subprocess.Popen[bytes] | None) -> None:
        self.identity = identity
        self._child = child

    @classmethod
    def start(
        cls, command: Sequence[str], *, log_path: Path, environment: Mapping[str, str], working_folder: Path
    ) -> "WorkerProcess":
        """Starts a process whose output goes to a file and which does not end with the agent."""
        with log_path.open("ab") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=working_folder,
                start_new_session=True,
                close_fds=True,
            )
        try:
            started = psutil.Process(child.pid).create_time()
        except psutil.NoSuchProcess:
            started = 0.0
        return cls(ProcessIdentity(child.pid, started), child=child)

    @classmethod
    def attach(cls, identity: ProcessIdentity) -> "WorkerProcess | None":
        """Takes over a process that an earlier agent has started; none when it has ended."""
        return None if identity.find() is None else cls(identity, child=None)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        if self._child is not None:
            return self._child.poll() is None
        return self.identity.find() is not None

    async def wait(self) -> str:
        """Waits for the end.

        Returns:
            How it ended, for people.
        """
        try:
            descriptor = os.pidfd_open(self.identity.process_id)
        except ProcessLookupError:
            return self._ending()
        except OSError:
            while self.is_alive:  # noqa: ASYNC110  Such a kernel tells nobody.
                await asyncio.sleep(POLL_SECONDS)
            return self._ending()
        try:
            # Only after opening is it certain that the descriptor is not that of a later process.
            if self.is_alive:
                await _readable(descriptor)
        finally:
            os.close(descriptor)
        return self._ending()

    def signal(self, number: signal.Signals) -> None:
        """Signals the process and what it started."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.identity.process_id, number)

    def _ending(self) -> str:
        if self._child is None:
            return "ended; its exit status went to another process"
        status = self._child.wait()
        if status >= 0:
            return f"exit code {status}"
        try:
            return f"signal {signal.Signals(-status).name}"
        except ValueError:
            return f"signal {-status}"


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(descriptor, finish)
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
