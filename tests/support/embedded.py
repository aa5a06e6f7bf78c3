"""An embedded cluster of real processes on free ports, with its logs shown when a test fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

LIMIT_SECONDS = 60.0

Answer = TypeVar("Answer")


def eventually(what: str, ask: Callable[[], Answer], *, limit_seconds: float = LIMIT_SECONDS) -> Answer:
    """Asks until the answer is true; fails when it never is."""
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        answer = ask()
        if answer:
            return answer
        time.sleep(0.02)
    raise AssertionError(f"never came true: {what}")


class EmbeddedCluster:
    """`kvist up --detach` in a folder of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def kvist(self, *arguments: str, code: int = 0) -> str:
        """Runs the command and returns what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "kvist.cli", *arguments],
            env={**os.environ, "KVIST_HOME": str(self.home), "NO_COLOR": "1", "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert code == done.returncode, f"{arguments}: {done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout + done.stderr

    def up(self, *arguments: str) -> None:
        self.kvist("up", "--http-port=0", "--grpc-port=0", *arguments, "--detach")

    def down(self) -> None:
        if self.record().get("phase") == "ready":
            self.kvist("down")

    def record(self) -> dict[str, Any]:
        try:
            return json.loads((self.home / "cluster.json").read_text())
        except FileNotFoundError:
            return {}

    def address(self, name: str) -> str:
        return self.record()["addresses"][name]

    def sources(self) -> list[dict[str, Any]]:
        return json.loads(self.kvist("kv", "status", "--json").rpartition("}")[0] + "}").get("sources", [])

    def kill(self, name: str) -> None:
        os.kill(self.record()["process_ids"][name], signal.SIGKILL)

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.home.glob("logs/*.log"))
        )
