"""Two controllers on one store: both answer, one decides."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kvist.certificates import CertificateFolder
from kvist.controller.v1 import controller_pb2 as pb
from kvist.controller.v1.controller_pb2_grpc import ControllerServiceStub
from kvist.errors import KvistError, rpc_errors
from kvist.grpc import open_channel
from kvist.readiness import Readiness
from kvist.runner import Process
from kvist.settings import ListenSettings, StoreSettings
from kvist.store.sqlite import SqliteStore
from kvist_controller.app import ControllerApp
from kvist_controller.settings import ControllerSettings
from support.certificates import authority, files_of
from support.control_plane import ClusterReader, ScriptedAgent, manifest

LIMIT_SECONDS = 40
LEASE_SECONDS = 1.0


@dataclass(slots=True)
class Running:
    """A controller of this process."""

    process: Process[ControllerSettings]
    stub: ControllerServiceStub
    task: asyncio.Task[None]
    address: str

    async def leave(self) -> None:
        """Stops it as SIGTERM does."""
        self.process.stopping.set()
        await self.task


@contextlib.asynccontextmanager
async def controller(store: Path, name: str, folder: CertificateFolder | None = None) -> AsyncIterator[Running]:
    """A whole controller: store, election, server; with certificates it asks its clients for one too."""
    settings = ControllerSettings(
        name=name, cluster="test", store=StoreSettings(path=store), leader_lease_seconds=LEASE_SECONDS
    )
    tls = None
    if folder is not None:
        tls, own = files_of(folder, "operator"), files_of(folder, "controller")
        listen = ListenSettings(
            tls_certificate_file=own.certificate_file, tls_key_file=own.key_file, tls_client_ca_file=own.ca_file
        )
        settings = settings.model_copy(update={"grpc": listen, "controller_tls_ca_file": own.ca_file})
    ready = store.with_name(f"{name}.json")
    process = Process("controller", settings, Readiness(start="starting"), ready)
    task = asyncio.create_task(ControllerApp(process).run())
    try:
        while not ready.exists():
            await asyncio.sleep(0.01)
        address = json.loads(ready.read_text())["grpc_address"]
        async with open_channel(address, tls=tls, retries=False) as channel:
            yield Running(process, ControllerServiceStub(channel), task, address)
    finally:
        process.stopping.set()
        await task


@contextlib.asynccontextmanager
async def leader_and_standby(
    tmp_path: Path, folder: CertificateFolder | None = None
) -> AsyncIterator[tuple[Running, Running]]:
    path = tmp_path / "state.sqlite"
    async with asyncio.timeout(LIMIT_SECONDS), controller(path, "first", folder) as first:
        while not first.process.readiness.is_ready:
            await asyncio.sleep(0.01)
        async with controller(path, "second", folder) as second:
            while not second.process.readiness.is_ready:
                await asyncio.sleep(0.01)
            yield first, second


async def test_a_standby_serves_agents_and_reads_and_passes_on_what_the_leader_does(tmp_path: Path) -> None:
    async with leader_and_standby(tmp_path) as (first, second):
        await second.stub.Apply(pb.ApplyRequest(resource=manifest(replicas=1)))
        async with ScriptedAgent(second.stub) as agent:
            await agent.until(lambda: agent.assignment.workers)
            agent.make_ready(agent.assignment.workers[0])
            await agent.beat()
            states = [
                await ClusterReader(stub).until(lambda state: state.workers) for stub in (first.stub, second.stub)
            ]
            assert states[0] == states[1]
            await agent.until(lambda: agent.verdicts)
            for stub in (first.stub, second.stub):
                listed = await stub.ListNodes(pb.ListNodesRequest())
                assert [("node-a", True)] == [(node.inventory.node_uid, node.present) for node in listed.nodes]
        request = pb.GetRequest(kind="ModelService", name="smol")
        async with asyncio.timeout(5):
            while await first.stub.Get(request) != await second.stub.Get(request):
                await asyncio.sleep(0.01)
        watch = second.stub.Watch(pb.WatchRequest(kind="ModelService"))
        assert (await watch.read()).resource.metadata.name == "smol"
        assert (await watch.read()).type == pb.WATCH_EVENT_TYPE_SYNCED
        await second.stub.Delete(pb.DeleteRequest(kind="ModelService", name="smol"))
        while not (await watch.read()).resource.metadata.HasField("deleted_at"):
            pass
        with pytest.raises(KvistError) as caught, rpc_errors():
            await second.stub.Get(pb.GetRequest(kind="ModelService", name="none"))
        assert caught.value.code == "NOT_FOUND"


async def test_an_agents_session_and_a_watch_outlive_the_leader(tmp_path: Path) -> None:
    async with leader_and_standby(tmp_path) as (first, second):
        await first.stub.Apply(pb.ApplyRequest(resource=manifest(replicas=1)))
        async with ScriptedAgent(second.stub) as agent:
            await agent.until(lambda: agent.assignment.workers)
            agent.make_ready(agent.assignment.workers[0])
            await agent.beat()
            reader = ClusterReader(second.stub)
            before = await reader.until(lambda state: state.workers)
            fence = agent.assignment.fence
            await first.leave()
            # The same stream, with what the next leader says.
            await agent.until(lambda: agent.assignment.fence > fence)
            assert [worker.worker_uid for worker in agent.assignment.workers] == list(agent.workers)
            await second.stub.Apply(pb.ApplyRequest(resource=manifest(replicas=1, aliases=["other"])))
            after = await reader.until(lambda state: list(state.models[0].aliases) == ["other"])
            assert before.workers == after.workers
            assert (after.version.store_epoch, before.version.store_epoch) == (before.version.store_epoch,) * 2
            assert after.version.revision > before.version.revision


async def test_each_tells_whether_it_leads_and_whether_the_store_answers(tmp_path: Path) -> None:
    async with leader_and_standby(tmp_path) as (first, second):

        def numbers(running: Running) -> tuple[float | None, ...]:
            registry = running.process.registry
            wanted = ("kvist_leader", "kvist_store_up", "kvist_leader_changes_total")
            return tuple(registry.get_sample_value(name) for name in wanted)

        assert (1.0, 1.0, 1.0) == numbers(first)
        assert (0.0, 1.0, 1.0) == numbers(second)
        await first.leave()
        while numbers(second) != (1.0, 1.0, 2.0):
            await asyncio.sleep(0.02)


async def test_controllers_show_each_other_their_certificates(tmp_path: Path) -> None:
    folder = authority(tmp_path / "certificates")
    async with (
        leader_and_standby(tmp_path, folder) as (first, second),
        open_channel(second.address, tls=files_of(folder, "agent"), retries=False) as channel,
    ):
        await second.stub.Apply(pb.ApplyRequest(resource=manifest(replicas=1)))
        async with ScriptedAgent(ControllerServiceStub(channel)) as agent:
            await agent.until(lambda: agent.assignment.workers)
        assert [node.inventory.node_uid for node in (await first.stub.ListNodes(pb.ListNodesRequest())).nodes] == [
            "node-a"
        ]


async def test_a_call_that_was_passed_on_is_not_passed_on_again(tmp_path: Path) -> None:
    async with leader_and_standby(tmp_path) as (_, second):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second.stub.ListNodes(pb.ListNodesRequest(), metadata=(("kvist-passed-on", "1"),))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_leader_whose_claim_was_taken_steps_down_and_goes_on_as_a_standby(tmp_path: Path) -> None:
    """As after a pause that was longer than its lease."""
    async with leader_and_standby(tmp_path) as (first, second), SqliteStore(tmp_path / "state.sqlite") as store:
        key = "/kvist/test/v1/elections/controller"
        claim = await store.get(key)
        assert claim is not None
        await store.revoke_lease(claim.lease_id)
        while (new := await store.get(key)) is None or new.create_revision == claim.create_revision:
            await asyncio.sleep(0.01)
        # Whoever leads now, both serve, and one decides.
        for running in (first, second):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await running.stub.ListNodes(pb.ListNodesRequest())
                    break
                await asyncio.sleep(0.05)
            assert not running.task.done()
