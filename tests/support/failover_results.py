"""The file from which docs/reference/failover.md is made."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import psutil

from support.failover import Measurement, Scene


def write_results(scene: Scene) -> None:
    """Writes what was measured to the file that `KVIST_FAILOVER_RESULTS` names, if it does."""
    path = os.environ.get("KVIST_FAILOVER_RESULTS")
    if not path:
        return
    load = scene.load
    record = {
        "test": "tests/chaos/test_control_plane.py",
        "machine": {
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "kernel": platform.release(),
        },
        "controller_lease_seconds": scene.form.controller_lease_seconds,
        "outage_seconds": scene.form.outage_seconds,
        "streaming_requests": len(load.outcomes),
        "retried_requests": sum(len(outcome.attempts) > 1 for outcome in load.outcomes),
        "failed_requests": len(load.bad()),
        "killed_engines": len(scene.killed_engines),
        "rows": scene.rows,
    }
    Path(path).write_text(json.dumps(record, indent=2) + "\n")


def add_results(measurement: Measurement) -> None:
    """Adds what was measured on another mesh to that file."""
    path = os.environ.get("KVIST_FAILOVER_RESULTS")
    if not path:
        return
    record = json.loads(Path(path).read_text())
    record["streaming_requests"] += len(measurement.load.outcomes)
    record["failed_requests"] += len(measurement.load.bad())
    record["rows"] += measurement.rows
    Path(path).write_text(json.dumps(record, indent=2) + "\n")
