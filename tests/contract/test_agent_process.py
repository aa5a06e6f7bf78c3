"""Processes that an agent starts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil

from kvist_agent.process import WorkerProcess, end_left_behind

# Starts a process, as an engine does, says which, and lives on.
PARENT = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
partial = pathlib.Path(sys.argv[1] + ".partial")
partial.write_text(str(child.pid))
partial.rename(sys.argv[1])
time.sleep(600)
"""


async def start(folder: Path) -> tuple[WorkerProcess, psutil.Process]:
    named = folder / "child"
    process = WorkerProcess.start(
        [sys.executable, "-c", PARENT, str(named)],
        log_path=folder / "log",
        environment=os.environ,
        working_folder=folder,
    )
    async with asyncio.timeout(20):
        while not named.exists():
            await asyncio.sleep(0.02)
    return process, psutil.Process(int(named.read_text()))


async def test_what_a_dead_worker_left_behind_is_ended(tmp_path: Path) -> None:
    process, child = await start(tmp_path)
    os.kill(process.identity.process_id, signal.SIGKILL)
    assert await process.wait() == "signal SIGKILL"
    assert child.is_running()
    assert end_left_behind(process.identity) == 1
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert end_left_behind(process.identity) == 0


async def test_nothing_of_a_living_worker_is_ended(tmp_path: Path) -> None:
    process, child = await start(tmp_path)
    assert end_left_behind(process.identity) == 0
    assert child.is_running()
    process.signal(signal.SIGKILL)
    assert await process.wait() == "signal SIGKILL"
    child.wait(timeout=10)
