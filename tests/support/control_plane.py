"""A controller over a real gRPC server and a SQLite store, and an agent made of messages."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
from prometheus_client import CollectorRegistry

from kvist.agent.v1.agent_pb2 import WORKER_PHASE_READY, AttachedEngine, NodeInventory, WorkerSpec, WorkerStatus
from kvist.controller.v1 import controller_pb2 as pb
from kvist.controller.v1.controller_pb2_grpc import ControllerServiceStub, add_ControllerServiceServicer_to_server
from kvist.grpc import GrpcServer, Registration, open_channel
from kvist.settings import ListenSettings
from kvist.store.election import lead
from kvist.store.sqlite import SqliteStore
from kvist_controller.app import SERVICE_NAME
from kvist_controller.control import Controller
from kvist_controller.follower import Follower
from kvist_controller.instance import Instance
from kvist_controller.plain import to_struct
from kvist_controller.presence import PresenceTimes
from kvist_controller.published import PublishedState
from kvist_controller.records import Keys, LeaderRecord
from kvist_controller.service import ControllerService
from kvist_controller.settings import RegistrySettings
from kvist_controller.silence import Silence


@dataclass(frozen=True, slots=True)
class ControlPlane:
    store: SqliteStore
    controller: Controller
    stub: ControllerServiceStub
    address: str


@contextlib.asynccontextmanager
async def control_plane(
    path: Path,
    *,
    lease_seconds: float = 10.0,
    replace_after_seconds: float = 30.0,
    listen: str = "127.0.0.1:0",
    silence: Silence | None = None,
    join_token_file: Path | None = None,
) -> AsyncIterator[ControlPlane]:
    async with (
        SqliteStore(path) as store,
        lead(store, Keys("test").election, identity="test", ttl_seconds=5) as leadership,
    ):
        times = PresenceTimes(lease_seconds=lease_seconds, replace_after_seconds=replace_after_seconds)
        published = PublishedState()
        controller = Controller(store, leadership, cluster="test", times=times, silence=silence, published=published)
        await controller.load()
        registry = RegistrySettings(lease_seconds=lease_seconds, heartbeat_interval_seconds=lease_seconds / 5)
        instance = Instance(
            LeaderRecord("test", ""),
            Follower(store, Keys("test"), published),
            published,
            join_token_file=join_token_file,
        )
        instance.set_leading(controller)
        servicer = ControllerService(instance, registry)
        add = functools.partial(add_ControllerServiceServicer_to_server, servicer)
        async with (
            GrpcServer(
                ListenSettings(listen=listen), services=[Registration(SERVICE_NAME, add)], registry=CollectorRegistry()
            ) as server,
            open_channel(server.address, retries=False) as channel,
            asyncio.TaskGroup() as group,
        ):
            running = [group.create_task(controller.run()), group.create_task(controller.watch_silent_nodes())]
            try:
                yield ControlPlane(store, controller, ControllerServiceStub(channel), server.address)
            finally:
                for task in running:
                    task.cancel()
                # The sessions end before the channel does, so that no handler outlives the store.
                await server.stop(grace_seconds=0.0)


def manifest(name: str = "smol", **spec: object) -> pb.Resource:
    return pb.Resource(
        api_version="kvist.dev/v1alpha1",
        kind="ModelService",
        metadata=pb.Metadata(name=name),
        spec=to_struct({"engine": {"name": "sim"}, **spec}),
    )


class ScriptedAgent:
    """An agent without processes: the test decides what its workers do."""

    def __init__(
        self, stub: ControllerServiceStub, *, uid: str = "node-a", engines: tuple[str, ...] = ("sim",)
    ) -> None:
        self.uid = uid
        self.welcome = pb.RegisterWelcome()
        self.assignment = pb.Assignment()
        self.verdicts: dict[str, pb.WorkerVerdict] = {}
        self.workers: dict[str, WorkerStatus] = {}
        self.attached: list[AttachedEngine] = []
        self._inventory = NodeInventory(node_uid=uid, name=uid, processors=4, engines=engines)
        self._call: grpc.aio.StreamStreamCall = stub.Register()

    async def __aenter__(self) -> Self:
        hello = pb.AgentHello(inventory=self._inventory, address="127.0.0.1:1", workers=self.workers.values())
        await self._call.write(pb.RegisterRequest(hello=hello))
        await self.until(lambda: self.welcome.cluster)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()

    async def until(self, condition: Callable[[], object]) -> None:
        """Reads responses until the condition holds."""
        while not condition():
            response = await self._call.read()
            assert isinstance(response, pb.RegisterResponse), "the session has ended"
            match response.WhichOneof("message"):
                case "welcome":
                    self.welcome = response.welcome
                case "assignment":
                    self.assignment = response.assignment
                case "verdicts":
                    self.verdicts = {verdict.worker_uid: verdict for verdict in response.verdicts.verdicts}

    async def beat(self) -> None:
        beat = pb.Heartbeat(
            workers=self.workers.values(),
            assignment_number=self.assignment.assignment_number,
            attached=self.attached,
        )
        await self._call.write(pb.RegisterRequest(heartbeat=beat))

    def make_ready(self, spec: WorkerSpec, *, incarnation: int = 100, **description: object) -> None:
        status = WorkerStatus(spec=spec, phase=WORKER_PHASE_READY, address=f"127.0.0.1:{incarnation}")
        fields = {
            "worker_uid": spec.worker_uid,
            "incarnation": incarnation,
            "model": spec.model,
            "engine": spec.engine,
            "block_size_tokens": 16,
            "ranks": 1,
            "tokenizer_digest": "aa",
            "namespace": spec.model,
            "pool_revision": spec.pool_revision,
            "hash_seed": spec.hash_seed,
            "capabilities": {"kv_events": True},
            **description,
        }
        status.MergeFrom(WorkerStatus(description=fields))
        self.workers[spec.worker_uid] = status


class ClusterReader:
    """Reads cluster states until one is as wanted."""

    def __init__(self, stub: ControllerServiceStub) -> None:
        self._call = stub.WatchCluster(pb.WatchClusterRequest(subscriber="test"))
        self.states: list[pb.ClusterState] = []

    async def until(self, condition: Callable[[pb.ClusterState], object]) -> pb.ClusterState:
        while True:
            response = await self._call.read()
            assert isinstance(response, pb.WatchClusterResponse), "the watch has ended"
            self.states.append(response.state)
            if condition(response.state):
                return response.state
