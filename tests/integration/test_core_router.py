"""The router of the core in front of simulated workers: HTTP, gRPC, loss of a worker, draining."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
from openai import AsyncOpenAI

from kvist import _core
from kvist.controller.v1 import controller_pb2
from kvist.grpc import open_channel
from kvist.router.v1 import router_pb2, router_pb2_grpc
from support.scrape import scrape

pytestmark = pytest.mark.integration


@dataclass
class Mesh:
    """A router and its workers."""

    runtime: _core.Runtime
    router: _core.RouterServer
    addresses: dict
    workers: dict[str, tuple[_core.WorkerServer, dict]]
    revision: int = 0

    def state(self) -> bytes:
        """The cluster state of the workers that are left."""
        self.revision += 1
        pool = controller_pb2.Pool(uid="pool", revision="1", replicas=len(self.workers))
        entries = [
            controller_pb2.WorkerEntry(
                target=router_pb2.Target(
                    worker_uid=uid, address=addresses["grpc_address"], pool_uid="pool", pool_revision="1"
                ),
                model="sim",
                incarnation=addresses["incarnation"],
                ranks=1,
                block_size_tokens=16,
                namespace="sim",
            )
            for uid, (_, addresses) in self.workers.items()
        ]
        return controller_pb2.ClusterState(
            version=controller_pb2.ClusterVersion(store_epoch=1, revision=self.revision),
            cluster="test",
            hash_seed=3,
            models=[controller_pb2.Model(name="sim", uid="m", pools=[pool])],
            workers=entries,
        ).SerializeToString()

    def status(self) -> dict:
        """The router's numbers."""
        return json.loads(self.router.status())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    runtime = _core.Runtime(2)
    router = _core.RouterServer(runtime, json.dumps({"name": "r-1"}))
    workers = {}
    for uid in ("w-1", "w-2"):
        settings = {
            "worker_uid": uid,
            "model": "sim",
            "hash_seed": 3,
            "pool_uid": "pool",
            "pool_revision": "1",
            "sim": {"decode_step_ms": 5.0},
        }
        worker = _core.WorkerServer(runtime, json.dumps(settings))
        workers[uid] = (worker, json.loads(await asyncio.to_thread(worker.start)))
    found = Mesh(runtime, router, json.loads(await asyncio.to_thread(router.start)), workers)
    assert found.status()["not_ready_reason"]
    assert router.apply_cluster_state(found.state())
    await until(lambda: found.status()["ready_targets"] == 2)
    async with asyncio.timeout(60):
        yield found
        await asyncio.to_thread(router.stop)
        for worker, _ in found.workers.values():
            await asyncio.to_thread(worker.stop)
    runtime.close()


def client(mesh: Mesh) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://{mesh.addresses['http_address']}/v1", api_key="none", max_retries=0)


async def test_the_official_client_talks_to_it(mesh: Mesh) -> None:
    async with client(mesh) as openai:
        assert ["sim"] == [model.id for model in (await openai.models.list()).data]
        answer = await openai.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": "Hello there"}], max_tokens=8
        )
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        text = ""
        stream = await openai.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": "Hello there"}], max_tokens=8, stream=True
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        assert text == answer.choices[0].message.content


async def test_grpc_and_explain(mesh: Mesh) -> None:
    async with open_channel(mesh.addresses["grpc_address"]) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        request = router_pb2.GenerateRequest(model="sim", prompt=router_pb2.Prompt(text="Once upon a time"))
        request.stop.max_tokens = 4
        responses = [response async for response in stub.Generate(request)]
        assert responses[-1].finished.usage.completion_tokens == 4
        explained = await stub.Explain(router_pb2.ExplainRequest(request_id=responses[0].request_id))
        assert {"w-1", "w-2"} == {candidate.worker_uid for candidate in explained.decisions[0].candidates}


async def test_a_state_is_taken_once_and_a_broken_one_never(mesh: Mesh) -> None:
    state = mesh.state()
    assert mesh.router.apply_cluster_state(state)
    assert not mesh.router.apply_cluster_state(state)
    # What it has is no news; what is older is counted, as is what cannot be read.
    assert mesh.router.apply_cluster_state(mesh.state())
    assert not mesh.router.apply_cluster_state(state)
    with pytest.raises(_core.CoreError) as caught:
        mesh.router.apply_cluster_state(b"\xff")
    assert caught.value.args[0] == "INVALID_ARGUMENT"
    metrics = await scrape(mesh.addresses["admin_address"])
    ignored = {reason: metrics[f"kvist_cluster_states_ignored_total {reason}"] for reason in ("older", "invalid")}
    assert ignored == {"older": 1, "invalid": 1}
    mesh.router.set_control_plane_connected(True)
    assert mesh.status()["control_plane_connected"]


async def test_a_worker_that_is_gone_is_not_used(mesh: Mesh) -> None:
    worker, _ = mesh.workers.pop("w-1")
    await asyncio.to_thread(worker.stop)
    await until(lambda: mesh.status()["ready_targets"] == 1)
    async with client(mesh) as openai:
        for _ in range(4):
            answer = await openai.completions.create(model="sim", prompt="x", max_tokens=2)
            assert answer.choices[0].finish_reason == "length"


async def test_draining_waits_and_refuses_what_is_new(mesh: Mesh) -> None:
    async with client(mesh) as openai:
        running = asyncio.create_task(openai.completions.create(model="sim", prompt="x", max_tokens=100))
        await until(lambda: mesh.status()["active_requests"] == 1)
        draining = asyncio.create_task(asyncio.to_thread(mesh.router.drain, 20_000))
        assert (await running).choices[0].finish_reason == "length"
        assert await draining
        assert mesh.status()["not_ready_reason"]


async def test_a_stream_that_is_cut_never_looks_complete(mesh: Mesh) -> None:
    host, port = mesh.addresses["http_address"].rsplit(":", 1)
    body = json.dumps({"model": "sim", "prompt": "x", "max_tokens": 2000, "stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + body)
    received = await reader.readuntil(b"\n\n")
    stopping = asyncio.create_task(asyncio.to_thread(mesh.router.stop))
    received += await reader.read()
    await stopping
    writer.close()
    assert b"[DONE]" not in received
    assert b'"finish_reason":"length"' not in received
    assert b'"error"' in received
