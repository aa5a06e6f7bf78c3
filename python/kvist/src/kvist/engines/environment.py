"""Where engines with environments of their own are."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from kvist.atomic_file import write_atomically

FOLDER_VARIABLE = "KVIST_ENGINES"
# Engines that `kvist engine install` knows.
NAMES = ("vllm",)
_SCHEMA_VERSION = 1
_RECORD = "kvist-engine.json"


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """What a finished installation leaves behind; there is none while one is under way.

    Attributes:
        engine: Name of the engine.
        variant: What it computes on: `cpu` or `cuda`.
        packages_sha256: Digest of the pinned packages.
        kvist: Where Kvist comes from: a version, or the folder of a checkout.
        schema_version: Version of this record's shape.
    """

    engine: str
    variant: str
    packages_sha256: str
    kvist: str
    schema_version: int = _SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """The environment of an engine, whether it is there or not.

    Attributes:
        name: Of the engine.
        folder: A virtual environment.
    """

    name: str
    folder: Path

    @classmethod
    def of(cls, name: str) -> Self:
        """Where the environment of an engine belongs."""
        return cls(name, engines_folder() / name)

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def read(self) -> EngineRecord | None:
        """What is installed there; none when nothing is, or not wholly."""
        try:
            record = EngineRecord(**json.loads((self.folder / _RECORD).read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return record if record.schema_version == _SCHEMA_VERSION and self.python.exists() else None

    def write(self, record: EngineRecord) -> None:
        """Says that the installation is finished."""
        write_atomically(self.folder / _RECORD, json.dumps(asdict(record), indent=2) + "\n")

    def forget(self) -> None:
        """Says that it is not finished any more."""
        (self.folder / _RECORD).unlink(missing_ok=True)


def engines_folder() -> Path:
    """`KVIST_ENGINES`, else `kvist/engines` below the user's data folder."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named).absolute()
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "kvist" / "engines"


def find(name: str) -> EngineEnvironment | None:
    """The environment of an engine; none when it is not installed."""
    environment = EngineEnvironment.of(name)
    return environment if environment.read() is not None else None


def installed() -> list[str]:
    """Names of engines that have an environment of their own here."""
    return [name for name in NAMES if find(name) is not None]
