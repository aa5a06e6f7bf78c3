"""The ledgers of a worker whose engine publishes its KV events as vLLM does, over recorded batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvist import _core
from kvist.engine.v1 import engine_pb2, engine_pb2_grpc
from kvist.events.v1 import events_pb2
from kvist.grpc import open_channel
from support.echo_engine import EchoEngine
from support.fake_vllm import FakeVllm, recorded

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
SETTINGS = {"worker_uid": "w-1", "model": "m", "engine": "vllm", "hash_seed": 5}
BLOCK_SIZE_TOKENS = 32
SECONDS = 30


class PublishingEngine(EchoEngine):
    """An engine whose events come from sockets."""

    def __init__(self, vllm: FakeVllm, engine_rank: int) -> None:
        super().__init__()
        self._vllm, self._engine_rank = vllm, engine_rank
        self.refusals: list[str] = []

    def description(self) -> str:
        return json.dumps({**json.loads(super().description()), "block_size_tokens": BLOCK_SIZE_TOKENS})

    def start(self, host: _core.EngineHost) -> None:
        super().start(host)
        sockets = {
            "endpoint": self._vllm.events_endpoint,
            "replay_endpoint": self._vllm.replay_endpoint,
            "engine_rank": self._engine_rank,
        }
        for rank, settings in ((1, sockets), (0, {"endpoint": "x"})):
            with pytest.raises(_core.CoreError) as refused:
                host.follow_vllm(rank, json.dumps(settings))
            self.refusals.append(str(refused.value))
        host.follow_vllm(0, json.dumps({**sockets, "hash_algorithm": "sha256"}))


class Worker:
    """A worker in this process."""

    def __init__(self, server: _core.WorkerServer, engine: PublishingEngine, stub: Any) -> None:
        self.server, self.engine, self._stub = server, engine, stub

    @property
    def host(self) -> _core.EngineHost:
        assert self.engine.host is not None
        return self.engine.host

    async def digest(self) -> events_pb2.LedgerDigest:
        """What the ledger says of itself; it says nothing by itself while the engine is out of touch."""
        call = self._stub.WatchKvEvents(engine_pb2.WatchKvEventsRequest(follow=True), timeout=SECONDS)
        async for response in call:
            if response.WhichOneof("part") == "digest":
                call.cancel()
                return response.digest
        raise AssertionError("no digest")

    async def becomes(self, *, blocks: int, complete: bool) -> None:
        """Waits for a state of the ledger."""
        seen: tuple[int, bool] | None = None
        try:
            async with asyncio.timeout(SECONDS):
                while seen != (blocks, complete):
                    digest = await self.digest()
                    seen = (sum(tier.block_count for tier in digest.tiers), digest.complete)
        except TimeoutError:
            raise AssertionError(f"the ledger has {seen}") from None


@asynccontextmanager
async def working(vllm: FakeVllm, *, engine_rank: int = 0) -> AsyncIterator[Worker]:
    runtime = _core.Runtime(2)
    engine = PublishingEngine(vllm, engine_rank)
    server = _core.WorkerServer(runtime, json.dumps(SETTINGS), engine)
    async with vllm.running():
        addresses = json.loads(await asyncio.to_thread(server.start))
        try:
            async with open_channel(addresses["grpc_address"], retries=False) as channel:
                yield Worker(server, engine, engine_pb2_grpc.EngineServiceStub(channel))
        finally:
            await asyncio.to_thread(server.stop)
            runtime.close()


async def test_what_the_engine_publishes_is_in_the_ledger_whatever_its_sockets_lose() -> None:
    vllm, payloads = FakeVllm(), recorded()
    # Before anybody reads: the reader begins with what was published first.
    await vllm.publish(payloads[0])
    async with working(vllm) as worker:
        no_rank, no_endpoint = worker.engine.refusals
        assert "no such rank" in no_rank
        assert "replay_endpoint" in no_endpoint
        await worker.becomes(blocks=3, complete=True)
        await vllm.publish(payloads[1], is_lost=True)
        await vllm.publish(payloads[2], is_lost=True)
        await worker.becomes(blocks=4, complete=True)
        assert not worker.server.has_failed()


async def test_nothing_is_claimed_from_an_order_to_clear_until_the_engine_has_obeyed() -> None:
    vllm, payloads = FakeVllm(), recorded()
    async with working(vllm) as worker:
        await vllm.publish(payloads[0])
        await worker.becomes(blocks=3, complete=True)
        assert await asyncio.to_thread(worker.host.clear_ordered) == 3
        await worker.becomes(blocks=0, complete=False)
        # Of a step before the order.
        await vllm.publish(payloads[1])
        questions = vllm.questions
        async with asyncio.timeout(SECONDS):
            # Once the reader verifies the last batch it has taken it.
            while vllm.questions == questions:
                await asyncio.sleep(0.02)
        assert not any(tier.block_count for tier in (await worker.digest()).tiers)


async def test_when_nothing_is_known_of_the_cache_the_account_starts_over() -> None:
    vllm, payloads = FakeVllm(), recorded()
    async with working(vllm) as worker:
        await vllm.publish(payloads[0])
        await worker.becomes(blocks=3, complete=True)
        await asyncio.to_thread(worker.host.cache_unknown)
        await worker.becomes(blocks=0, complete=False)


async def test_what_another_rank_says_is_not_taken_and_the_account_is_incomplete() -> None:
    vllm, payloads = FakeVllm(), recorded()
    async with working(vllm, engine_rank=1) as worker:
        await vllm.publish(payloads[0])
        await worker.becomes(blocks=0, complete=False)


async def test_another_start_of_the_engine_is_a_failure_of_the_worker() -> None:
    vllm, payloads = FakeVllm(), recorded()
    async with working(vllm) as worker:
        await vllm.publish(payloads[0])
        await worker.becomes(blocks=3, complete=True)
        vllm.restart()
        await vllm.publish(payloads[1])
        async with asyncio.timeout(SECONDS):
            while not worker.server.has_failed():
                await asyncio.sleep(0.02)
