"""Starts the embedded cluster in order, keeps it alive, and ends it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from dataclasses import dataclass

from google.protobuf import json_format

from kvist.controller.v1 import controller_pb2
from kvist.embedded.layout import ClusterRecord, Layout
from kvist.embedded.process import Child, ChildFailedError, ChildSpec
from kvist.process import write_atomically

# Below the sign bit: argparse and JSON both carry it exactly.
HASH_SEED_BITS = 48


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What to run.

    Attributes:
        model: Name of the served model.
        workers: Number of workers.
        http_listen: `host:port` of the HTTP edge.
        grpc_listen: `host:port` of the router's gRPC server.
        engine_arguments: JSON object for each engine.
    """

    model: str = "sim"
    workers: int = 2
    http_listen: str = "127.0.0.1:8000"
    grpc_listen: str = "127.0.0.1:7000"
    engine_arguments: str = "{}"


class EmbeddedCluster:
    """One router and its workers, supervised by this process."""

    def __init__(self, layout: Layout, spec: ClusterSpec) -> None:
        self._layout = layout
        self._spec = spec
        self._hash_seed = secrets.randbits(HASH_SEED_BITS)
        self._store_epoch = time.time_ns()
        self._revision = 0
        self._phase = "starting"
        self.workers = [self._worker(number) for number in range(spec.workers)]
        self.router = Child(
            self._spec_of(
                "router",
                "kvist_router",
                "--name=router",
                f"--http-listen={spec.http_listen}",
                f"--grpc-listen={spec.grpc_listen}",
                f"--cluster-file={layout.cluster_file}",
            ),
            on_change=self._changed,
        )

    async def run(self) -> None:
        """Runs until SIGTERM or SIGINT.

        Raises:
            ChildFailedError: A process could not be started; all others have ended.
        """
        self._layout.make()
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        try:
            self._write_record("starting the workers")
            await self._start_all(self.workers)
            self._write_cluster_state()
            self._write_record("starting the router")
            await self._start_all([self.router])
            self._phase = "ready"
            self._write_record("")
            async with asyncio.TaskGroup() as tasks:
                keepers = [tasks.create_task(child.keep_alive()) for child in (*self.workers, self.router)]
                await stop.wait()
                self._phase = "stopping"
                self._write_record("")
                await self._stop_all()
                await asyncio.wait(keepers, timeout=30)
                for keeper in keepers:
                    keeper.cancel()
        finally:
            await self._stop_all()

    async def _start_all(self, children: list[Child]) -> None:
        outcomes = await asyncio.gather(*(child.start() for child in children), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _stop_all(self) -> None:
        # The router first, so that its requests end before the workers do.
        await self.router.stop()
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    async def _changed(self) -> None:
        self._write_cluster_state()
        self._write_record("")

    def _worker(self, number: int) -> Child:
        uid = f"{self._spec.model}-{number}"
        return Child(
            self._spec_of(
                uid,
                "kvist_worker",
                f"--uid={uid}",
                f"--model={self._spec.model}",
                f"--hash-seed={self._hash_seed}",
                f"--engine-arguments={self._spec.engine_arguments}",
            ),
            on_change=self._changed,
        )

    def _spec_of(self, name: str, module: str, *arguments: str) -> ChildSpec:
        ready_path = self._layout.run / f"{name}.ready.json"
        return ChildSpec(
            name=name,
            command=(sys.executable, "-m", module, *arguments, f"--ready-file={ready_path}"),
            log_path=self._layout.logs / f"{name}.log",
            ready_path=ready_path,
            environment={},
        )

    def _write_cluster_state(self) -> None:
        """Tells the router which workers live. A dead one's incarnation is closed, so that its blocks are gone."""
        self._revision += 1
        state = controller_pb2.ClusterState(cluster="embedded", hash_seed=self._hash_seed)
        state.version.store_epoch = self._store_epoch
        state.version.revision = self._revision
        model = state.models.add(name=self._spec.model, uid=f"{self._spec.model}-{self._store_epoch:x}")
        model.created_at.FromNanoseconds(self._store_epoch)
        for worker in self.workers:
            if not worker.addresses:
                continue
            incarnation = int(worker.addresses["incarnation"])
            if not worker.process_id:
                state.dead_incarnations.add(worker_uid=worker.spec.name, incarnation=incarnation)
                continue
            entry = state.workers.add(
                model=self._spec.model,
                incarnation=incarnation,
                ranks=1,
                block_size_tokens=int(worker.addresses["block_size_tokens"]),
            )
            entry.target.worker_uid = worker.spec.name
            entry.target.address = worker.addresses["address"]
        write_atomically(self._layout.cluster_file, json_format.MessageToJson(state))

    def _write_record(self, message: str) -> None:
        addresses = {worker.spec.name: worker.addresses["address"] for worker in self.workers if worker.addresses}
        if self.router.addresses:
            addresses |= {"http": self.router.addresses["http"], "router": self.router.addresses["grpc"]}
        children = (*self.workers, self.router)
        ClusterRecord(
            phase=self._phase,
            supervisor_process_id=os.getpid(),
            addresses=addresses,
            process_ids={child.spec.name: child.process_id for child in children},
            message=message,
        ).write(self._layout)


def record_failure(layout: Layout, error: ChildFailedError) -> ClusterRecord:
    """Writes down why the cluster could not start, for whoever waits for it."""
    record = ClusterRecord(
        phase="failed",
        supervisor_process_id=os.getpid(),
        message=f"{error}\n{error.log_tail}".rstrip(),
        hint=hint_for(error.log_tail) or f"the whole log is {error.log_path}",
    )
    record.write(layout)
    return record


def hint_for(log_tail: str) -> str:
    """What to do about the commonest failures."""
    if "Address already in use" in log_tail:
        return "another program has the port; choose others with --http-port and --grpc-port, or end that program"
    return ""
