"""Facts of the machine and of the build, which every result carries: figures of two machines do not compare."""

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from kvist import _core

ROOT = Path(__file__).resolve().parent.parent


class DevelopmentBuildError(Exception):
    """The extension is the one that `./task sync` builds without optimisation."""


def machine_facts() -> dict[str, Any]:
    """The machine: processor, memory, kernel, language versions, and what else it was doing."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "rustc": _output("rustc", "--version"),
        "load_average_before": [round(value, 2) for value in os.getloadavg()],
    }


def build_facts() -> dict[str, Any]:
    """The code: commit, profile, and the digest of the extension.

    Raises:
        DevelopmentBuildError: The extension lies in the checkout, as only development builds do.
    """
    extension = Path(_core.__file__ or "")
    if not extension.is_relative_to(sys.prefix):
        raise DevelopmentBuildError(str(extension))
    return {
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "uncommitted_changes": bool(_output("git", "-C", str(ROOT), "status", "--porcelain", "--", "crates", "proto")),
        # A wheel is always built with the profile that python/kvist/pyproject.toml names.
        "profile": "release",
        "extension_sha256": hashlib.sha256(extension.read_bytes()).hexdigest(),
        "extension_bytes": extension.stat().st_size,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
