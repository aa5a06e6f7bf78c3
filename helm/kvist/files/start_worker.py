"""Starts a worker inside its agent's pod: `start_worker.py --settings-file FILE …`.

The agent tells a worker what differs between workers. This program adds what all of them share (`worker.settings` of
the chart's values), then becomes the worker.
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
    settings = {**json.loads(Path(__file__).with_name("worker.json").read_text()), **json.loads(given.read_text())}
    complete = given.with_name("settings-of-pod.json")
    complete.write_text(json.dumps(settings, indent=2) + "\n")
    arguments[position] = str(complete)
    # The same process goes on, so the agent keeps watching the one it has started.
    os.execv(sys.executable, [sys.executable, "-m", "kvist_worker", *arguments])  # noqa: S606  No shell is the point.


if __name__ == "__main__":
    main()
