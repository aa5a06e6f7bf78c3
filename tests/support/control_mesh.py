"""A mesh whose control plane is doubled: three etcd members, and two of each process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc

from kvist.agent.v1.agent_pb2 import WorkerStatus
from kvist.controller.v1 import controller_pb2 as pb
from kvist.controller.v1.controller_pb2_grpc import ControllerServiceStub
from kvist.etcd import EtcdOptions, EtcdStore
from kvist.grpc import open_channel
from kvist.kvmaster.v1 import kvmaster_pb2
from kvist.kvmaster.v1.kvmaster_pb2_grpc import KvMasterServiceStub
from kvist.manifest import to_resource
from kvist.store import EventType, StoreError
from support.etcd_process import EtcdCluster
from support.fake_clock import FakeClock
from support.mesh import CALL_SECONDS, Mesh, until
from support.tcp_proxy import TcpProxy
from support.toxiproxy import Link, Toxiproxy

ROOT_KEY = "/kvist/default/v1/"
CONTROLLER_KEY = f"{ROOT_KEY}elections/controller"
KVMASTER_KEY = f"{ROOT_KEY}elections/kvmaster"
# Longer than a controller waits for etcd.
CHANGE_SECONDS = 6.0
ROUTERS = ("router-0", "router-1")
# A request of the steady load waits about as long for its first token as it takes from there to its end.
ENGINE_ARGUMENTS: dict[str, object] = {"decodeStepMs": 15, "prefillTokensPerSecond": 100}


class ControlMesh(Mesh):
    """Adds names of several controllers and KV masters to a mesh, and the history of its store."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.etcd = EtcdCluster(folder)
        self.record_folder = folder / "engines"
        # By what way agents, routers and KV masters reach each controller, and all of them NATS.
        self.controller_doors: dict[str, TcpProxy] = {}
        self.nats_door = TcpProxy(self.nats.port)
        self.toxiproxy = Toxiproxy(folder)
        # By what way each controller reaches each member of etcd.
        self.etcd_links: dict[str, dict[str, Link]] = {}
        # Of routers beside the usual two that clients have sent requests to.
        self.further_routers: list[str] = []
        self.clocks: dict[str, FakeClock] = {}
        self._changes = 0
        # Up to where the store's history was seen.
        self.seen_revision = 0
        # (revision, key, value, or none when the claim ended) of every election.
        self.claims: list[tuple[int, str, str | None]] = []

    @property
    def controllers(self) -> list[str]:
        return [self.services[name].address for name in ("controller-0", "controller-1")]

    @property
    def common_settings(self) -> dict[str, object]:
        """Those of all that know controllers and the bus."""
        doors = ",".join(f"127.0.0.1:{door.port}" for door in self.controller_doors.values())
        return {"controllers": doors, "bus.urls": f"nats://127.0.0.1:{self.nats_door.port}"}

    def router_settings(self, name: str) -> dict[str, object]:
        """Those of a router."""
        return self.common_settings | {
            "name": name,
            "kvmasters": ",".join(self.kvmasters),
            "worker_threads": 2,
            "drain_seconds": 1,
            "last_state_file": self.folder / f"{name}.state.json",
        }

    @property
    def kvmasters(self) -> list[str]:
        return [self.services[name].address for name in ("kvmaster-0", "kvmaster-1")]

    @property
    def agents(self) -> list[str]:
        """Names of the agents."""
        return [name for name in self.services if name.startswith("agent")]

    @property
    def routers(self) -> list[str]:
        """Names of the routers that clients send requests to."""
        return [*ROUTERS, *self.further_routers]

    def edges(self) -> list[str]:
        """Where clients send requests."""
        return [str(self.services[name].addresses["http_address"]) for name in ROUTERS]

    async def watch_claims(self, store: EtcdStore) -> None:
        """Notes each change of the elections in the store's history, for ever; an outage loses none."""
        while True:
            with contextlib.suppress(StoreError):
                async with contextlib.aclosing(
                    store.watch(f"{ROOT_KEY}elections/", after_revision=self.seen_revision)
                ) as batches:
                    async for batch in batches:
                        for event in batch.events:
                            if event.key in {CONTROLLER_KEY, KVMASTER_KEY}:
                                value = None if event.type is EventType.DELETE else event.value.decode()
                                self.claims.append((event.revision, event.key, value))
                        self.seen_revision = batch.revision
            await asyncio.sleep(0.1)

    def claims_of(self, key: str) -> list[tuple[int, str | None]]:
        """Revision and value of each change of one election, as far as the store was seen."""
        return [(revision, value) for revision, claimed, value in self.claims if claimed == key]

    def holder(self, key: str) -> str:
        """Who claims an election's key as far as the store was seen; empty for nobody."""
        claims = self.claims_of(key)
        value = claims[-1][1] if claims else None
        if value is None:
            return ""
        return str(json.loads(value)["name"]) if value.startswith("{") else value

    async def until_led(self, key: str, *, by_other_than: str, limit_seconds: float) -> float:
        """Seconds until somebody else claims a key."""
        started = time.monotonic()
        await until(
            f"{key} has another holder",
            lambda: self.holder(key) not in {"", by_other_than},
            limit_seconds=limit_seconds,
        )
        return time.monotonic() - started

    async def change(self, *, replicas: int, limit_seconds: float = 60.0) -> float:
        """Applies the model service with something new, by whichever controller takes it; seconds until one did."""
        self._changes += 1
        manifest = {
            "apiVersion": "kvist.dev/v1alpha1",
            "kind": "ModelService",
            "metadata": {"name": "sim"},
            "spec": {
                "engine": {"name": "sim", "arguments": ENGINE_ARGUMENTS | {"recordFolder": str(self.record_folder)}},
                "replicas": replicas,
                # A change of it restarts nothing, and routers hear of it.
                "aliases": [self.alias],
                "drainTimeout": "1s",
            },
        }
        started = time.monotonic()
        async with asyncio.timeout(limit_seconds):
            while True:
                for address in self.controllers:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        async with open_channel(address, retries=False) as channel:
                            request = pb.ApplyRequest(resource=to_resource(manifest))
                            done = await ControllerServiceStub(channel).Apply(request, timeout=CHANGE_SECONDS)
                        assert done.resource.metadata.resource_version
                        return time.monotonic() - started
                await asyncio.sleep(0.1)

    @property
    def alias(self) -> str:
        """Another name of the model, which tells one change from the next."""
        return f"sim-{self._changes}"

    async def workers(self) -> dict[str, WorkerStatus]:
        """As a mesh's; nothing is learned while nobody leads."""
        try:
            return await super().workers()
        except grpc.aio.AioRpcError:
            return {}

    async def until_workers(self, count: int) -> None:
        """Waits until the cluster state has so many workers, none of which is about to go."""
        await until(
            f"{count} workers are there",
            lambda: len(self.state.workers) == count and not any(worker.draining for worker in self.state.workers),
        )

    async def watch_state(self) -> None:
        """Follows the cluster state at whichever controller answers, for ever."""
        while True:
            for address in self.controllers:
                with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                    async with open_channel(address, retries=False) as channel:
                        request = pb.WatchClusterRequest(subscriber="test")
                        request.pulse_interval.FromMilliseconds(300)
                        call = ControllerServiceStub(channel).WatchCluster(request)
                        while True:
                            async with asyncio.timeout(2):
                                response = await call.read()
                            if not isinstance(response, pb.WatchClusterResponse):
                                break
                            if response.HasField("state"):
                                self.state = response.state
            await asyncio.sleep(0.05)

    async def role_of(self, address: str) -> tuple[int, int]:
        """Role and fence that a KV master states; zeros when it does not answer."""
        try:
            async with open_channel(address, retries=False) as channel:
                stats = await KvMasterServiceStub(channel).Stats(kvmaster_pb2.StatsRequest(), timeout=0.5)
        except grpc.aio.AioRpcError:
            return 0, 0
        return stats.role, stats.fence

    async def lookup(self, address: str) -> kvmaster_pb2.LookupResponse:
        """A lookup of nothing in particular."""
        request = kvmaster_pb2.LookupRequest(blocks=kvmaster_pb2.BlockHashes(hashes=[1, 2]))
        async with open_channel(address, retries=False) as channel:
            return await KvMasterServiceStub(channel).Lookup(request, timeout=CALL_SECONDS)

    def send(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to a process of Kvist."""
        os.kill(self.services[name].process_id, number)

    async def close(self) -> None:
        for name in (*ROUTERS, "kvmaster-0", "kvmaster-1"):
            service = self.services.get(name)
            if service is not None and service.process is not None and service.process.returncode is None:
                service.process.kill()
                await service.process.wait()
        # Their agents end the workers.
        await super().close()
        for name in ("controller-0", "controller-1"):
            service = self.services.get(name)
            if service is not None and service.process is not None and service.process.returncode is None:
                service.process.kill()
                await service.process.wait()


@contextlib.asynccontextmanager
async def control_mesh(
    folder: Path, *, controller_lease_seconds: float, on_start: Callable[[ControlMesh], None] = lambda _mesh: None
) -> AsyncIterator[ControlMesh]:
    """A mesh with two idle agents and no workers yet."""
    mesh = ControlMesh(folder)
    on_start(mesh)
    async with contextlib.AsyncExitStack() as stack:
        toxiproxy = await stack.enter_async_context(mesh.toxiproxy)
        await stack.enter_async_context(mesh.etcd.running(toxiproxy=toxiproxy))
        await mesh.nats.start()
        store = {"store.kind": "etcd", "store.etcd.endpoints": ",".join(mesh.etcd.endpoints)}
        watched = await stack.enter_async_context(EtcdStore(EtcdOptions(mesh.etcd.endpoints)))
        tasks = [
            asyncio.create_task(mesh.watch_claims(watched)),
        ]
        try:
            lease = {"leader_lease_seconds": controller_lease_seconds}
            for number in (0, 1):
                name = f"controller-{number}"
                clock = FakeClock(folder / f"{name}.clock")
                mesh.clocks[name] = clock
                links = mesh.etcd_links[name] = {
                    member: await toxiproxy.link(f"{name}-etcd-{member}", process.client_port)
                    for member, process in mesh.etcd.members.items()
                }
                own = {"name": name, "store.etcd.endpoints": ",".join(link.address for link in links.values())}
                await mesh.start_service(name, "controller", store | lease | own, environment=clock.environment)
                door = TcpProxy(int(mesh.services[name].address.rpartition(":")[2]))
                mesh.controller_doors[name] = await stack.enter_async_context(door)
            mesh.services["controller"] = mesh.services["controller-0"]
            await stack.enter_async_context(mesh.nats_door)
            common = mesh.common_settings
            await asyncio.gather(
                *(
                    mesh.start_service(name, "kvmaster", common | store | {"name": name, "worker_threads": 1})
                    for name in ("kvmaster-0", "kvmaster-1")
                ),
                *(
                    mesh.start_service(
                        f"agent-{number}",
                        "agent",
                        common
                        | {
                            "node_name": f"node-{number}",
                            "state_folder": folder / f"agent-{number}",
                            "workers.stop_on_exit": "true",
                        },
                    )
                    for number in (0, 1)
                ),
            )
            await asyncio.gather(*(mesh.start_service(name, "router", mesh.router_settings(name)) for name in ROUTERS))
            tasks.append(asyncio.create_task(mesh.watch_state()))
            yield mesh
        except BaseException:
            print("\n".join(f"--- {name}\n{mesh.log(name)}" for name in mesh.services))
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(Exception):
                await mesh.workers()
            await mesh.close()
