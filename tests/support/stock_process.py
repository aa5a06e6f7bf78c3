"""The process of `support.stock_server`, as tests start, script and kill it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 60


class StockProcess:
    """A server that Kvist did not start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> None:
        """Starts it, at the port that it had before."""
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "support.stock_server", str(self.folder), f"--port={self.port}", *flags]
        self._process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})
        deadline = time.monotonic() + LIMIT_SECONDS
        while not ready.exists():
            assert self._process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.port = json.loads(ready.read_text())["port"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def arguments(self) -> dict[str, Any]:
        """What a worker has to be told."""
        return {"url": self.url, "tokenizer": str(self.folder)}

    def freeze(self) -> None:
        """It says nothing any more, and keeps its connections."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """Ends it without a farewell."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def script(self, mode: str = "", **more: Any) -> None:
        """What it shall do with each stream from now on."""
        self._call("POST", {"mode": mode, **more})

    def log(self) -> dict[str, Any]:
        """What it was asked."""
        return self._call("GET", None)

    def last_seen(self) -> dict[str, Any]:
        """The last request for a stream."""
        seen: list[dict[str, Any]] = self.log()["seen"]
        return seen[-1]

    def _call(self, method: str, body: Any) -> dict[str, Any]:
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_SECONDS)
        ) as connection:
            connection.request(method, "/script", None if body is None else json.dumps(body))
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer
