"""What the agent keeps on disk: one folder for each worker slot, and its own identity.

```
<state folder>/
  node.json              UID of the node
  session.json           the last terms and the highest fence of a controller
  attached/<uid>.incarnation   the last incarnation of an engine that runs already
  slots/<worker uid>/    slot.json, settings.json, ready.json, worker.log, worker.log.1
```
"""

import json
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from google.protobuf import json_format

from kvist.agent.v1.agent_pb2 import WorkerSpec
from kvist.atomic_file import write_atomically
from kvist_agent.process import ProcessIdentity

SCHEMA_VERSION = 1
# What is read of a log to find out why its worker ended, and how much of the reason is passed on.
_LAST_WORDS_BYTES = 64 * 1024
_LONGEST_FAILURE = 1_000
_FAILURE_EVENT = b"worker_failed"
# UIDs name folders and NATS subjects, so anything else is refused.
WORKER_UID_PATTERN = re.compile(r"[a-z0-9]([a-z0-9-]{0,126}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """What survives a restart of the agent.

    Attributes:
        spec: What the slot runs.
        process: The process; none when it has ended.
        address: `host:port` of the worker's gRPC server; empty before it listened.
        admin_address: `host:port` of its admin server.
        incarnation: The last incarnation known, so that a later start has a greater one; 0 for none.
        starts: Starts of the process so far.
        is_stopping: Whether the slot's end was decided.
        was_ready: Whether the process was ready once.
    """

    spec: WorkerSpec
    process: ProcessIdentity | None = None
    address: str = ""
    admin_address: str = ""
    incarnation: int = 0
    starts: int = 0
    is_stopping: bool = False
    was_ready: bool = False

    def to_json(self) -> dict[str, Any]:
        """As it is stored."""
        return {
            "schema_version": SCHEMA_VERSION,
            "spec": json_format.MessageToDict(self.spec, preserving_proto_field_name=True),
            "process": None if self.process is None else asdict(self.process),
            "address": self.address,
            "admin_address": self.admin_address,
            "incarnation": self.incarnation,
            "starts": self.starts,
            "is_stopping": self.is_stopping,
            "was_ready": self.was_ready,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """As it was stored.

        Raises:
            ValueError: It is of another version or damaged.
        """
        if value.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"slot record of schema version {value.get('schema_version')!r}")
        try:
            process = value["process"]
            return cls(
                spec=json_format.ParseDict(value["spec"], WorkerSpec()),
                process=None if process is None else ProcessIdentity(**process),
                address=value["address"],
                admin_address=value["admin_address"],
                incarnation=value["incarnation"],
                starts=value["starts"],
                is_stopping=value["is_stopping"],
                # Records that agents without the field have written are still read.
                was_ready=value.get("was_ready", False),
            )
        except (KeyError, TypeError, json_format.ParseError) as error:
            raise ValueError(f"damaged slot record: {error}") from error


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What the agent last heard from a controller.

    Attributes:
        cluster: Name of the cluster; empty before the first welcome.
        hash_seed: Seed of the cluster's block hashes.
        fence: Highest fence seen.
    """

    cluster: str = ""
    hash_seed: int = 0
    fence: int = 0


class SlotFolder:
    """The files of one worker slot."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def settings_path(self) -> Path:
        """What the worker is started with."""
        return self.path / "settings.json"

    @property
    def ready_path(self) -> Path:
        """Where the worker says that it listens."""
        return self.path / "ready.json"

    @property
    def log_path(self) -> Path:
        """What the worker writes."""
        return self.path / "worker.log"

    def write(self, record: SlotRecord) -> None:
        """Replaces the record."""
        write_json(self.path / "slot.json", record.to_json())

    def read(self) -> SlotRecord | None:
        """The record; none when there is none that can be read."""
        try:
            return SlotRecord.from_json(json.loads((self.path / "slot.json").read_text()))
        except (FileNotFoundError, ValueError):
            return None

    def rotate_log(self) -> None:
        """Puts the log of the last start aside; the one before is dropped."""
        if self.log_path.exists():
            self.log_path.replace(self.path / "worker.log.1")

    def failure(self) -> str:
        """Why the worker could not start or go on, in its own words; empty when it did not say."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - _LAST_WORDS_BYTES))
                lines = log.read().splitlines()
        except FileNotFoundError:
            return ""
        for line in reversed(lines):
            if _FAILURE_EVENT not in line:
                continue
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and record.get("event") == "worker_failed":
                return str(record.get("reason", ""))[:_LONGEST_FAILURE]
        return ""

    def make(self) -> None:
        """Makes the folder, readable by the owner alone."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def remove(self) -> None:
        """Forgets the slot."""
        shutil.rmtree(self.path, ignore_errors=True)


class StateFolder:
    """All files of the agent."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._slots = root / "slots"
        self._slots.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def attached(self) -> Path:
        """Where the incarnations of attached engines are."""
        return self.root / "attached"

    def node_uid(self) -> str:
        """UID of the node, made at the first call."""
        path = self.root / "node.json"
        try:
            return str(json.loads(path.read_text())["node_uid"])
        except FileNotFoundError:
            uid = f"node-{uuid.uuid4().hex[:12]}"
            write_json(path, {"schema_version": SCHEMA_VERSION, "node_uid": uid})
            return uid

    def read_session(self) -> SessionRecord:
        """What was last heard from a controller."""
        try:
            value = json.loads((self.root / "session.json").read_text())
            return SessionRecord(**value)
        except (FileNotFoundError, ValueError, TypeError):
            return SessionRecord()

    def write_session(self, record: SessionRecord) -> None:
        """Replaces what was last heard."""
        write_json(self.root / "session.json", asdict(record))

    def accept_fence(self, fence: int) -> bool:
        """Remembers a fence; false when a higher one was seen."""
        session = self.read_session()
        if fence < session.fence:
            return False
        if fence > session.fence:
            self.write_session(replace(session, fence=fence))
        return True

    def slot(self, worker_uid: str) -> SlotFolder:
        """The folder of a slot.

        Raises:
            ValueError: The UID could name something else than a folder of ours.
        """
        if WORKER_UID_PATTERN.fullmatch(worker_uid) is None:
            raise ValueError("a worker UID has lower-case letters, digits and '-' alone")
        return SlotFolder(self._slots / worker_uid)

    def slots(self) -> list[SlotFolder]:
        """The folders of all known slots."""
        return [SlotFolder(path) for path in sorted(self._slots.iterdir()) if path.is_dir()]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replaces a file so that a reader sees the old or the new content, never a part."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")
