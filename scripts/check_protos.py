"""Holds the protos against those of the last tag: what was released stays compatible. No tag, no promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIME_LIMIT_SECONDS = 120


def last_tag() -> str:
    """The last tag before the present commit; empty when there is none."""
    command = ("git", "describe", "--tags", "--abbrev=0")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS, check=False)
    return done.stdout.strip()


def main() -> int:
    """Checks and returns the exit code."""
    tag = last_tag()
    if not tag:
        return 0
    command = ("buf", "breaking", "proto", "--against", f".git#tag={tag},subdir=proto")
    return subprocess.run(command, cwd=ROOT, timeout=TIME_LIMIT_SECONDS, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
