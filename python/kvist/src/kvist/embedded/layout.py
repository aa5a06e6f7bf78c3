"""Where an embedded cluster keeps its files, and the record by which other commands find it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvist.atomic_file import write_atomically

RECORD_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """The folders of one embedded cluster."""

    root: Path

    @classmethod
    def default(cls) -> Layout:
        """`KVIST_HOME`, else `.kvist` in the present folder."""
        return cls(Path(os.environ.get("KVIST_HOME") or ".kvist").absolute())

    @property
    def record_path(self) -> Path:
        """The record of the running cluster."""
        return self.root / "cluster.json"

    @property
    def logs(self) -> Path:
        """One log file for each process."""
        return self.root / "logs"

    @property
    def run(self) -> Path:
        """Settings and ready files of the processes."""
        return self.root / "run"

    @property
    def state_path(self) -> Path:
        """The state store."""
        return self.root / "state.sqlite"

    @property
    def agent_folder(self) -> Path:
        """What the agent keeps of its worker slots."""
        return self.root / "agent"

    def worker_log(self, worker_uid: str) -> Path:
        """The log of one worker, which the agent keeps."""
        return self.agent_folder / "slots" / worker_uid / "worker.log"

    def make(self) -> None:
        """Makes the folders; readable by the owner alone, since logs and state lie there."""
        for folder in (self.root, self.logs, self.run, self.agent_folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """What is known of a running embedded cluster.

    Attributes:
        phase: `starting`, `ready`, `stopping` or `failed`.
        supervisor_process_id: Process that keeps the others alive.
        addresses: `http`, `router`, `controller`, `kvmaster`, `agent` and `nats` as `host:port`; admin servers as
            `router_admin` and so on.
        process_ids: Process id by process name; 0 while it does not run.
        restarts: How often each process was started again, by its name.
        message: What happens at the moment, or why it failed.
        hint: What to do about a failure.
        schema_version: Version of this record's shape.
    """

    phase: str
    supervisor_process_id: int
    addresses: dict[str, str] = field(default_factory=dict)
    process_ids: dict[str, int] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    message: str = ""
    hint: str = ""
    schema_version: int = RECORD_SCHEMA_VERSION

    def write(self, layout: Layout) -> None:
        """Replaces the record on disk atomically."""
        write_atomically(layout.record_path, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, layout: Layout) -> ClusterRecord | None:
        """Reads the record; none when there is none or it is of another version."""
        try:
            value: dict[str, Any] = json.loads(layout.record_path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        if value.get("schema_version") != RECORD_SCHEMA_VERSION:
            return None
        return cls(**value)

    def is_supervised(self) -> bool:
        """Whether the supervisor's process lives."""
        try:
            os.kill(self.supervisor_process_id, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True
