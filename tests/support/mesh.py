"""A mesh of real processes on one machine, each of which a test may kill, freeze and start again.

Unlike `kvist up` it has several agents, each a node, and nobody but the test keeps anything alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from kvist.agent.v1.agent_pb2 import WorkerStatus
from kvist.controller.v1 import controller_pb2 as pb
from kvist.controller.v1.controller_pb2_grpc import ControllerServiceStub
from kvist.grpc import open_channel
from kvist.kvmaster.v1.kvmaster_pb2 import StatsRequest
from kvist.kvmaster.v1.kvmaster_pb2_grpc import KvMasterServiceStub
from kvist.manifest import to_resource
from kvist.router.v1.router_pb2 import ListSourcesRequest, SourceStatus
from kvist.router.v1.router_pb2_grpc import RouterServiceStub
from support.nats_process import NatsProcess

LIMIT_SECONDS = 90.0
CALL_SECONDS = 10.0
STOP_SECONDS = 15.0
LOG_CHARACTERS = 3_000
FREE_PORT = "127.0.0.1:0"


async def until(what: str, condition: Callable[[], object], *, limit_seconds: float = LIMIT_SECONDS) -> None:
    """Waits for a condition; fails when it never holds."""
    try:
        async with asyncio.timeout(limit_seconds):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"never came true: {what}") from None


@dataclass(slots=True)
class Service:
    """One process of Kvist.

    Attributes:
        name: Its name in this mesh.
        package: Its service.
        settings: What it is told.
        environment: Variables beside those of the test.
        addresses: Where it listens, from its first start on.
    """

    name: str
    package: str
    settings: dict[str, object]
    environment: Mapping[str, str] = field(default_factory=dict)
    addresses: dict[str, Any] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        return str(self.addresses["grpc_address"])

    @property
    def admin_address(self) -> str:
        return str(self.addresses["admin_address"])

    @property
    def process_id(self) -> int:
        assert self.process is not None
        return self.process.pid


class Mesh:
    """NATS, a controller, a KV master, a router and some agents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nats = NatsProcess(folder)
        self.services: dict[str, Service] = {}
        self.state = pb.ClusterState()
        self.on_state: Callable[[pb.ClusterState], None] = lambda _state: None
        self._worker_processes: dict[int, psutil.Process] = {}

    # Life.

    async def start_service(
        self,
        name: str,
        package: str,
        settings: Mapping[str, object],
        *,
        environment: Mapping[str, str] | None = None,
    ) -> Service:
        """Starts a process on free ports."""
        service = self.services[name] = Service(name, package, dict(settings), environment or {})
        await self.start_again(name)
        return service

    async def start_again(self, name: str) -> None:
        """Starts a process where it was before."""
        service = self.services[name]
        ready = self.folder / f"{name}.ready.json"
        ready.unlink(missing_ok=True)
        settings = dict(service.settings)
        for field_name, key in (
            ("grpc_address", self._listen_setting(service)),
            ("admin_address", "telemetry.admin_listen"),
        ):
            settings[key] = service.addresses.get(field_name, FREE_PORT)
        flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        with (self.folder / f"{name}.log").open("ab") as log:
            service.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", f"kvist_{service.package}", *flags, "--ready-file", str(ready),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | service.environment,
            )  # fmt: skip
        process = service.process

        def is_ready() -> bool:
            assert process.returncode is None, f"{name} has ended:\n{self.log(name)}"
            return ready.exists()

        await until(f"{name} listens", is_ready)
        service.addresses = json.loads(ready.read_text())

    @staticmethod
    def _listen_setting(service: Service) -> str:
        return "grpc_listen" if service.package == "router" else "grpc.listen"

    async def kill(self, name: str) -> None:
        """Ends a process without a farewell."""
        if name == "nats":
            await self.nats.stop()
            return
        process = self.services[name].process
        assert process is not None
        process.kill()
        await process.wait()

    async def kill_and_start_again(self, name: str, *, pause_seconds: float) -> None:
        """A process that is away for a while."""
        await self.kill(name)
        await asyncio.sleep(pause_seconds)
        await (self.nats.start() if name == "nats" else self.start_again(name))

    def process_id(self, name: str) -> int:
        return self.nats.process_id if name == "nats" else self.services[name].process_id

    async def freeze(self, process_id: int, *, seconds: float) -> None:
        """A process that says nothing for a while, and goes on as if no time had passed."""
        psutil.Process(process_id).send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            psutil.Process(process_id).send_signal(signal.SIGCONT)

    async def close(self) -> None:
        """Ends everything, the workers of killed agents included."""
        for names in (
            ("router", "kvmaster"),
            tuple(n for n in self.services if n.startswith("agent")),
            ("controller",),
        ):
            processes = [self.services[name].process for name in names if name in self.services]
            living = [process for process in processes if process is not None and process.returncode is None]
            for process in living:
                process.send_signal(signal.SIGCONT)
                process.terminate()
            for process in living:
                try:
                    await asyncio.wait_for(process.wait(), STOP_SECONDS)
                except TimeoutError:
                    process.kill()
                    await process.wait()
        # Workers outlive an agent that was killed; those that nobody has listed are known by their settings' folder.
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if any(argument.startswith(f"{self.folder}/") for argument in process.cmdline()):
                    process.kill()
        await self.nats.stop()

    # What is seen.

    async def watch(self) -> None:
        """Follows the cluster state for ever."""
        while True:
            try:
                async with open_channel(self.services["controller"].address, retries=False) as channel:
                    call = ControllerServiceStub(channel).WatchCluster(pb.WatchClusterRequest(subscriber="test"))
                    async for response in call:
                        if response.HasField("state"):
                            self.state = response.state
                            self.on_state(response.state)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)

    async def workers(self) -> dict[str, WorkerStatus]:
        """Workers by UID, as their agents state them."""
        async with open_channel(self.services["controller"].address) as channel:
            listed = await ControllerServiceStub(channel).ListNodes(pb.ListNodesRequest(), timeout=CALL_SECONDS)
        workers = {worker.spec.worker_uid: worker for node in listed.nodes for worker in node.workers}
        for worker in workers.values():
            if worker.process_id and worker.process_id not in self._worker_processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._worker_processes[worker.process_id] = psutil.Process(worker.process_id)
        return workers

    async def apply(self, *, replicas: int, engine_arguments: Mapping[str, object]) -> None:
        """Applies a model service on the simulated engine."""
        manifest = {
            "apiVersion": "kvist.dev/v1alpha1",
            "kind": "ModelService",
            "metadata": {"name": "sim"},
            "spec": {
                "engine": {"name": "sim", "arguments": dict(engine_arguments)},
                "replicas": replicas,
                "drainTimeout": "1s",
            },
        }
        async with open_channel(self.services["controller"].address) as channel:
            request = pb.ApplyRequest(resource=to_resource(manifest))
            await ControllerServiceStub(channel).Apply(request, timeout=CALL_SECONDS)

    def sees_workers(self, count: int) -> bool:
        """Whether the cluster state names so many workers."""
        return len(self.state.workers) == count

    async def sources(
        self, router: RouterServiceStub, kvmaster: KvMasterServiceStub, *, seconds: float = CALL_SECONDS
    ) -> dict[str, list[SourceStatus]]:
        """What each index says of its sources, by whose it is. One that does not answer says nothing."""

        async def ask(call: Any) -> list[SourceStatus]:
            try:
                return list((await call).sources)
            except grpc.aio.AioRpcError:
                return []

        listed = await asyncio.gather(
            ask(router.ListSources(ListSourcesRequest(), timeout=seconds)),
            ask(kvmaster.Stats(StatsRequest(), timeout=seconds)),
        )
        return {"router": listed[0], "kvmaster": listed[1]}

    async def kvist(self, *arguments: str) -> tuple[int, str]:
        """Runs a command of `kvist kv` against this mesh; its exit code and what it prints."""
        endpoints = [f"--{name}={self.services[name].address}" for name in ("router", "kvmaster", "controller")]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvist.cli", "kv", *arguments, *endpoints,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await asyncio.wait_for(process.communicate(), LIMIT_SECONDS)
        return process.returncode or 0, output.decode()

    async def process_ids(self) -> list[int]:
        """All processes that run for the test, and its own."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self.workers()
        # Workers of an agent that was killed are nobody's children.
        children = [child.pid for child in psutil.Process().children(recursive=True)]
        return sorted({os.getpid(), *children, *self._worker_processes})

    def log(self, name: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"{name}.log").read_text(errors="replace")[-LOG_CHARACTERS:]
        return ""


@contextlib.asynccontextmanager
async def running_mesh(
    mesh: Mesh,
    *,
    agents: int,
    bus_urls: Mapping[str, str] | None = None,
    controller: Mapping[str, object] | None = None,
) -> AsyncIterator[Mesh]:
    """A mesh without workers. `bus_urls` says by what way a process reaches NATS, where it is not straight."""
    folder = mesh.folder
    watching: asyncio.Task[None] | None = None
    try:
        await mesh.nats.start()
        store = {"store.path": folder / "state.sqlite"}
        await mesh.start_service("controller", "controller", store | dict(controller or {}))
        address = mesh.services["controller"].address
        common = {"controllers": address}

        def bus(name: str) -> dict[str, object]:
            return common | {"bus.urls": (bus_urls or {}).get(name, mesh.nats.url)}

        await asyncio.gather(
            mesh.start_service("kvmaster", "kvmaster", bus("kvmaster") | {"worker_threads": 1}),
            *(
                mesh.start_service(
                    f"agent-{number}",
                    "agent",
                    bus(f"agent-{number}")
                    | {
                        "node_name": f"node-{number}",
                        "state_folder": folder / f"agent-{number}",
                        "workers.stop_on_exit": "true",
                    },
                )
                for number in range(agents)
            ),
        )
        kvmaster = mesh.services["kvmaster"].address
        settings = {"kvmasters": kvmaster, "worker_threads": 2, "drain_seconds": 1}
        await mesh.start_service("router", "router", bus("router") | settings)
        watching = asyncio.create_task(mesh.watch())
        yield mesh
    except BaseException:
        print("\n".join(f"--- {name}\n{mesh.log(name)}" for name in mesh.services))
        raise
    finally:
        if watching is not None:
            watching.cancel()
        with contextlib.suppress(Exception):
            await mesh.workers()
        await mesh.close()
