"""`kvist up` as somebody at a terminal sees it: a live view, and Ctrl-C ends all of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from pathlib import Path

import psutil

from support.embedded import EmbeddedCluster, eventually

LIMIT_SECONDS = 60.0
CTRL_C = b"\x03"
ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def read_until(terminal: int, *wanted: str) -> str:
    """Reads until some texts have appeared, in any order, or until the program has gone when none is wanted."""
    seen = ""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        ready, _, _ = select.select([terminal], [], [], 0.2)
        if not ready:
            continue
        with contextlib.suppress(OSError):
            data = os.read(terminal, 65_536)
            if data:
                seen += ESCAPE_SEQUENCE.sub("", data.decode(errors="replace"))
                if wanted and all(text in seen.replace("\r\n", "") for text in wanted):
                    return seen
                continue
        return seen
    raise AssertionError(f"{wanted!r} never appeared in:\n{seen[-4000:]}")


def test_the_view_is_live_and_ctrl_c_ends_everything(tmp_path: Path) -> None:
    cluster = EmbeddedCluster(tmp_path / "home")
    process_id, terminal = pty.fork()
    if process_id == 0:  # pragma: no cover  The child becomes the command.
        os.environ |= {"KVIST_HOME": str(cluster.home), "TERM": "xterm-256color"}
        command = [sys.executable, "-m", "kvist.cli", "up", "--engine=sim", "--http-port=0", "--grpc-port=0"]
        os.execv(sys.executable, command)
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 160, 0, 0))
        names = ("nats", "controller", "kvmaster", "router", "agent")
        # A worker may be known to the index before its controller calls it ready.
        seen = read_until(terminal, "Ctrl-C stops all of it", "EXACT", "READY", *names)
        assert f"http://{cluster.address('http')}/v1/chat/completions" in seen.replace("\r\n", "")
        workers = eventually("both workers run", lambda: len(found := cluster.workers()) == 2 and found)
        processes = [*cluster.record()["process_ids"].values(), *(w["process_id"] for w in workers.values())]
        assert 7 == len(processes)
        os.write(terminal, CTRL_C)
        assert "stopped" in read_until(terminal)
        _, status = os.waitpid(process_id, 0)
        assert 0 == os.waitstatus_to_exitcode(status)
        assert not [one for one in processes if psutil.pid_exists(one)]
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGTERM)
        print(cluster.logs())
        raise
