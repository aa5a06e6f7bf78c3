"""Starts a worker inside its agent's pod: `start_worker.py --settings-file FILE …`.

A worker listens on loopback unless its settings say otherwise, and the agent tells it no address, so routers in other
pods could not reach it. This program adds the pod's address and what all workers share, then becomes the worker.
"""
# ruff: noqa: INP001  A program by itself.

import json
import os
import sys
from pathlib import Path

FLAG = "--settings-file"


def main() -> None:
    """Writes the settings of this pod beside the agent's, and becomes the worker."""
    arguments = sys.argv[1:]
    position = arguments.index(FLAG) + 1
    given = Path(arguments[position])
    host = os.environ["POD_IP"]
    listen = f"[{host}]:0" if ":" in host else f"{host}:0"
    settings = {
        **json.loads(Path(__file__).with_name("worker.json").read_text()),
        **json.loads(given.read_text()),
        "grpc_listen": listen,
        "admin_listen": listen,
    }
    complete = given.with_name("settings-of-pod.json")
    complete.write_text(json.dumps(settings, indent=2) + "\n")
    arguments[position] = str(complete)
    # The same process goes on, so the agent keeps watching the one it has started.
    os.execv(sys.executable, [sys.executable, "-m", "kvist_worker", *arguments])  # noqa: S606  No shell is the point.


if __name__ == "__main__":
    main()
