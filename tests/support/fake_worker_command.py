"""How an agent starts the fake worker."""

import sys
from pathlib import Path

from kvist_agent.slot_files import SlotFolder

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")


def fake_worker_command(folder: SlotFolder) -> list[str]:
    """Program and arguments, as `kvist_agent.app` makes them for a real one."""
    return [
        sys.executable, str(FAKE_WORKER),
        "--settings-file", str(folder.settings_path), "--ready-file", str(folder.ready_path),
    ]  # fmt: skip
