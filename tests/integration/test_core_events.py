"""KV events of a simulated worker: relay, NATS, index, and the index caught up without NATS."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvist import _core, names
from kvist.controller.v1 import controller_pb2
from kvist.engine.v1 import engine_pb2, engine_pb2_grpc
from kvist.events.v1 import events_pb2
from kvist.grpc import open_channel
from kvist.kvmaster.v1 import kvmaster_pb2
from kvist.router.v1 import router_pb2
from kvist_agent.relay_metrics import RelayCollector
from kvist_kvmaster.index_metrics import IndexCollector
from support.nats_process import nats_process
from support.scrape import scrape

pytestmark = pytest.mark.integration
SEED = 11
PROMPT = list(range(100))


@pytest.fixture
def runtime() -> AsyncIterator[_core.Runtime]:
    opened = _core.Runtime(2)
    yield opened
    opened.close()


def cluster_state(addresses: dict, *, revision: int) -> bytes:
    return controller_pb2.ClusterState(
        version=controller_pb2.ClusterVersion(store_epoch=1, revision=revision),
        cluster="test",
        hash_seed=SEED,
        models=[controller_pb2.Model(name="sim", uid="m", pools=[controller_pb2.Pool(uid="pool", revision="1")])],
        workers=[
            controller_pb2.WorkerEntry(
                target=router_pb2.Target(
                    worker_uid="w-1", address=addresses["grpc_address"], pool_uid="pool", pool_revision="1"
                ),
                model="sim",
                incarnation=addresses["incarnation"],
                ranks=1,
                block_size_tokens=16,
            )
        ],
    ).SerializeToString()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


async def generate(address: str, prompt: list[int]) -> None:
    async with open_channel(address) as channel:
        request = engine_pb2.EngineRequest(
            tokens=engine_pb2.TokenIds(ids=prompt), stop=engine_pb2.StopConditions(max_tokens=1)
        )
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        async for _ in stub.Generate(engine_pb2.GenerateRequest(request=request)):
            pass


def lookup(index: _core.IndexService, prompt: list[int]) -> kvmaster_pb2.LookupResponse:
    request = kvmaster_pb2.LookupRequest(tokens=engine_pb2.TokenIds(ids=prompt), namespace="sim", block_size_tokens=16)
    return kvmaster_pb2.LookupResponse.FromString(index.lookup(request.SerializeToString()))


def matched(index: _core.IndexService, prompt: list[int]) -> int:
    return sum(tier.blocks for match in lookup(index, prompt).matches for tier in match.matches)


async def test_an_index_learns_what_a_worker_holds(runtime: _core.Runtime, tmp_path: Path) -> None:
    worker = _core.WorkerServer(runtime, json.dumps({"worker_uid": "w-1", "model": "sim", "hash_seed": SEED}))
    addresses = json.loads(await asyncio.to_thread(worker.start))
    async with asyncio.timeout(60), nats_process(tmp_path) as nats:
        bus = {"nats_url": nats.url, "cluster": "test"}
        relay = _core.Relay(runtime, json.dumps(bus))
        relay.start()
        relay.set_workers(json.dumps([{"uid": "w-1", "address": addresses["grpc_address"]}]))
        index = _core.IndexService(runtime, json.dumps(bus | {"byte_budget": 1 << 20}))
        await generate(addresses["grpc_address"], PROMPT)
        index.start()
        assert index.apply_cluster_state(cluster_state(addresses, revision=2))
        assert not index.apply_cluster_state(cluster_state(addresses, revision=1))
        assert not index.apply_cluster_state(cluster_state(addresses, revision=2))
        # Held before the index existed: caught up straight from the worker.
        await until(lambda: matched(index, PROMPT) == 6)
        # Stored while it listens: comes over NATS.
        await until(lambda: json.loads(relay.stats())["workers"]["w-1"]["connected"])
        other = [7, *PROMPT]
        await generate(addresses["grpc_address"], other)
        await until(lambda: matched(index, other) == 6)
        (match,) = lookup(index, other).matches
        assert (match.source.worker_uid, match.source.incarnation) == ("w-1", addresses["incarnation"])
        assert match.state == events_pb2.SOURCE_STATE_EXACT
        stats = kvmaster_pb2.StatsResponse.FromString(index.stats())
        assert [12] == [tier.block_count for source in stats.sources for tier in source.tiers]
        assert 0 < stats.index_bytes <= stats.index_byte_budget
        parts = [kvmaster_pb2.BootstrapResponse.FromString(part) for part in index.bootstrap([]).next_parts()]
        assert sum(len(blocks.block_hashes) for part in parts for blocks in part.snapshot.blocks) == 12
        assert parts[-1].done.sources == 1
        assert json.loads(index.feed_stats())["bus_connected"]
        registry = CollectorRegistry(auto_describe=True)
        registry.register(RelayCollector(relay))
        registry.register(IndexCollector(index))
        of_worker = {"worker": "w-1"}
        assert registry.get_sample_value(names.RELAY_BUS_CONNECTED) == 1
        assert registry.get_sample_value(names.RELAY_CONNECTED, of_worker) == 1
        assert registry.get_sample_value(names.RELAY_BATCHES, of_worker) >= 1
        assert registry.get_sample_value(names.RELAY_BYTES, of_worker) > 0
        assert registry.get_sample_value(names.RELAY_DROPPED_BATCHES, of_worker) >= 0
        assert registry.get_sample_value(names.BUS_CONNECTED) == 1
        assert registry.get_sample_value(names.INDEX_SOURCES, {"state": "exact"}) == 1
        assert registry.get_sample_value(names.INDEX_BYTES) == stats.index_bytes
        assert registry.get_sample_value(names.INDEX_BLOCKS) == 12
        assert registry.get_sample_value(names.INDEX_DIVERGENCE_BLOCKS) == 0
        assert registry.get_sample_value(names.INDEX_BATCHES) >= 1
        assert registry.get_sample_value(names.INDEX_CATCH_UPS) >= 1
        assert 0 < registry.get_sample_value(names.INDEX_EVENT_LAG_SECONDS) < 20
        assert 0 == registry.get_sample_value(names.INDEX_EVENT_LAG_BATCHES)
        assert registry.get_sample_value(names.INDEX_SKIPPED_BATCHES, {"reason": "no_room"}) == 0
        await until(lambda: registry.get_sample_value(names.INDEX_DIGEST_MATCHES) >= 1)
        assert registry.get_sample_value(names.INDEX_DIGEST_MISMATCHES) == 0
        index.stop()
        relay.stop()
    await asyncio.to_thread(worker.stop)


async def test_a_router_shows_what_it_hears_on_the_bus(runtime: _core.Runtime, tmp_path: Path) -> None:
    worker = _core.WorkerServer(runtime, json.dumps({"worker_uid": "w-1", "model": "sim", "hash_seed": SEED}))
    addresses = json.loads(await asyncio.to_thread(worker.start))
    async with asyncio.timeout(60), nats_process(tmp_path) as nats:
        relay = _core.Relay(runtime, json.dumps({"nats_url": nats.url, "cluster": "test"}))
        relay.start()
        router = _core.RouterServer(runtime, json.dumps({"name": "r-1", "nats_url": nats.url}))
        admin = json.loads(await asyncio.to_thread(router.start))["admin_address"]
        before = await scrape(admin)
        assert (0, 0) == (before[names.BUS_CONNECTED], before[names.INDEX_BATCHES])
        assert router.apply_cluster_state(cluster_state(addresses, revision=1))
        await until(lambda: json.loads(router.status())["exact_index_sources"] == 1)
        relay.set_workers(json.dumps([{"uid": "w-1", "address": addresses["grpc_address"]}]))
        await until(lambda: json.loads(relay.stats())["workers"]["w-1"]["connected"])
        await generate(addresses["grpc_address"], PROMPT)
        async with asyncio.timeout(20):
            while (await scrape(admin))[names.INDEX_BATCHES] == 0:
                await asyncio.sleep(0.1)
        after = await scrape(admin)
        assert after[names.BUS_CONNECTED] == 1
        assert after[names.INDEX_MESSAGES] >= 1
        assert after[names.INDEX_CATCH_UPS] >= 1
        assert after[names.INDEX_DIGEST_MISMATCHES] == 0
        assert after[f"{names.INDEX_SOURCES} exact"] == 1
        assert after[f"{names.INDEX_SKIPPED_BATCHES} no_room"] == 0
        await asyncio.to_thread(router.stop)
        relay.stop()
    await asyncio.to_thread(worker.stop)


async def test_an_index_without_nats_still_catches_up(runtime: _core.Runtime) -> None:
    worker = _core.WorkerServer(runtime, json.dumps({"worker_uid": "w-1", "model": "sim", "hash_seed": SEED}))
    addresses = json.loads(await asyncio.to_thread(worker.start))
    await generate(addresses["grpc_address"], PROMPT)
    settings = {"nats_url": "nats://127.0.0.1:1", "cluster": "test", "byte_budget": 1 << 20}
    index = _core.IndexService(runtime, json.dumps(settings))
    index.start()
    index.apply_cluster_state(cluster_state(addresses, revision=1))
    await until(lambda: matched(index, PROMPT) == 6)
    index.stop()
    assert matched(index, PROMPT) == 6
    await asyncio.to_thread(worker.stop)


def test_what_cannot_be_answered_is_refused(runtime: _core.Runtime) -> None:
    settings = {"nats_url": "nats://127.0.0.1:1", "cluster": "test", "byte_budget": 1 << 20}
    index = _core.IndexService(runtime, json.dumps(settings))
    for request in (
        kvmaster_pb2.LookupRequest(),
        kvmaster_pb2.LookupRequest(tokens=engine_pb2.TokenIds(ids=[1])),
    ):
        with pytest.raises(_core.CoreError) as caught:
            index.lookup(request.SerializeToString())
        assert caught.value.args[0] == "INVALID_ARGUMENT"
    with pytest.raises(_core.CoreError) as caught:
        index.apply_cluster_state(controller_pb2.ClusterState(cluster="other").SerializeToString())
    assert caught.value.args[0] == "INVALID_ARGUMENT"
    with pytest.raises(_core.CoreError) as caught:
        index.apply_cluster_state(controller_pb2.ClusterState(cluster="test").SerializeToString())
    assert caught.value.args[0] == "NOT_READY"
