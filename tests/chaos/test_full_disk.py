"""The disk below a SQLite store is full while streaming requests run: nothing changes, and nobody notices.

The controller is a real process whose files may grow no further (`RLIMIT_FSIZE`), which is what a full disk does to it.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import psutil
import pytest

from kvist.controller.v1 import controller_pb2 as pb
from kvist.controller.v1.controller_pb2_grpc import ControllerServiceStub
from kvist.grpc import open_channel
from kvist.manifest import to_resource
from support.engine_record import check_outcomes, read_engine_records
from support.failover import LIMIT_SECONDS, MODEL, Form, Measurement
from support.failover_results import add_results
from support.faults.controllers import until_served
from support.mesh import Mesh, running_mesh, until
from support.steady_load import SteadyLoad

FORM = Form.of_environment()

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not FORM.is_full, reason="only in `./task test:chaos`"),
]

WORKERS = 2
# As a router calls itself that is given no name.
ROUTER = "router-0"
# Of the log of changes, which then is larger than any other file that the controller writes.
LEAST_LOG_BYTES = 1_500_000
UNLIMITED = psutil.RLIM_INFINITY


async def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    async with running_mesh(mesh, agents=1):
        record_folder = tmp_path / "engines"
        change = Changes(mesh, record_folder)
        await change.apply()
        await until("all workers are there", lambda: mesh.sees_workers(WORKERS))
        edge = str(mesh.services["router"].addresses["http_address"])
        await until_served(edge)
        load = SteadyLoad(lambda: [edge], MODEL)
        measurement = Measurement(mesh, load, FORM)
        async with load.running():
            controller = psutil.Process(mesh.services["controller"].process_id)
            log = tmp_path / "state.sqlite-wal"
            while log.stat().st_size < LEAST_LOG_BYTES:
                await change.apply()
            await asyncio.sleep(1)
            workers = [(worker.target.worker_uid, worker.incarnation) for worker in mesh.state.workers]
            controller.rlimit(psutil.RLIMIT_FSIZE, (log.stat().st_size, UNLIMITED))
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                # What still fits into the last page of the file may be taken.
                for _ in range(10):
                    await change.apply()
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
            # Longer than leases of leaders and nodes.
            await load.until_finished(100, limit_seconds=LIMIT_SECONDS)
            assert [] == load.bad()
            assert workers == [(worker.target.worker_uid, worker.incarnation) for worker in mesh.state.workers]
            async with measurement.step("disk of SQLite no longer full: a change is taken", limit_seconds=5) as step:
                controller.rlimit(psutil.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))
                step.begin()
                async with asyncio.timeout(LIMIT_SECONDS):
                    while True:
                        with contextlib.suppress(grpc.aio.AioRpcError):
                            await change.apply()
                            break
                        await asyncio.sleep(0.05)
                step.end()
        assert [] == load.bad()
        assert workers == [(worker.target.worker_uid, worker.incarnation) for worker in mesh.state.workers]
        # Requests of the load alone: others asked whether somebody serves.
        records = read_engine_records(record_folder, routers=[ROUTER])
        asked = [record for record in records if record.request_id.startswith(load.prefix)]
        check_outcomes(load.outcomes, asked)
    add_results(measurement)


class Changes:
    """Applies a model service, with something new each time."""

    def __init__(self, mesh: Mesh, record_folder: Path) -> None:
        self._mesh = mesh
        self._arguments = {"decodeStepMs": 15, "recordFolder": str(record_folder)}
        self._number = 0

    async def apply(self) -> None:
        self._number += 1
        manifest = {
            "apiVersion": "kvist.dev/v1alpha1",
            "kind": "ModelService",
            "metadata": {"name": MODEL},
            "spec": {
                "engine": {"name": "sim", "arguments": self._arguments},
                "replicas": WORKERS,
                # A change of it restarts nothing.
                "drainTimeout": f"{1_000 + self._number}ms",
            },
        }
        async with open_channel(self._mesh.services["controller"].address, retries=False) as channel:
            request = pb.ApplyRequest(resource=to_resource(manifest))
            await ControllerServiceStub(channel).Apply(request, timeout=10)
