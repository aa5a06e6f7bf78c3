"""An agent's gRPC face over the ledger of an engine that Kvist did not start."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from kvist import names
from kvist.agent.v1 import agent_pb2 as pb
from kvist.agent.v1.agent_pb2_grpc import AgentServiceStub, add_AgentServiceServicer_to_server
from kvist.engine.v1 import engine_pb2
from kvist.errors import KvistError, rpc_errors
from kvist.events.v1.events_pb2 import LedgerDigest
from kvist.grpc import GrpcServer, Registration, open_channel
from kvist.settings import ListenSettings
from kvist_agent.app import SERVICE_NAME
from kvist_agent.attach_settings import AttachSettings
from kvist_agent.attached import AttachedEngines
from kvist_agent.inventory import read_inventory
from kvist_agent.service import AgentService
from kvist_agent.worker_client import GrpcWorkerClient
from support.fake_vllm import FakeVllm, recorded, two_ranks

LIMIT_SECONDS = 40
UID = "attached-1-stock"


class Attaching:
    """An agent's service with one attached engine."""

    def __init__(self, stub: AgentServiceStub, engines: AttachedEngines, registry: CollectorRegistry) -> None:
        self.stub = stub
        self.engines = engines
        self._registry = registry

    def number(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(name, {"worker": UID, "rank": "0", **labels})

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT_SECONDS):
            while not condition():
                await asyncio.sleep(0.01)

    def watch(self, *, follow: bool = False, **resume: int) -> AsyncIterator[pb.WatchKvEventsResponse]:
        resume_after = [engine_pb2.ResumePosition(**resume)] if resume else []
        request = engine_pb2.WatchKvEventsRequest(follow=follow, resume_after=resume_after)
        return self.stub.WatchKvEvents(pb.WatchKvEventsRequest(worker_uid=UID, request=request))


@pytest.fixture
async def engine() -> AsyncIterator[FakeVllm]:
    fake = FakeVllm()
    async with fake.running():
        yield fake


@contextlib.asynccontextmanager
async def attaching_to(engine: FakeVllm, folder: Path, **settings: int) -> AsyncIterator[Attaching]:
    registry = CollectorRegistry()
    attach = AttachSettings(
        name="stock",
        model="m",
        events_endpoint=engine.events_endpoint,
        replay_endpoint=engine.replay_endpoint,
        block_size_tokens=32,
        idle_interval_seconds=0.05,
        hash_algorithm="sha256_cbor",
        **settings,
    )
    engines = AttachedEngines([attach], folder=folder, node_uid="node-1", registry=registry)
    slots = SimpleNamespace(statuses=list)
    inventory = read_inventory(node_uid="node-1", name="n", labels={}, engines=[])
    service = AgentService(slots, attached=engines, client=GrpcWorkerClient(), inventory=inventory)
    add = functools.partial(add_AgentServiceServicer_to_server, service)
    async with (
        GrpcServer(
            ListenSettings(), services=[Registration(SERVICE_NAME, add)], registry=CollectorRegistry()
        ) as server,
        open_channel(server.address, retries=False) as channel,
    ):
        running = asyncio.create_task(engines.run())
        yield Attaching(AgentServiceStub(channel), engines, registry)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


@pytest.fixture
async def attaching(engine: FakeVllm, tmp_path: Path) -> AsyncIterator[Attaching]:
    async with attaching_to(engine, tmp_path) as attaching:
        yield attaching


async def test_before_its_engine_was_reached_it_is_not_spoken_of(attaching: Attaching, engine: FakeVllm) -> None:
    """R26."""
    assert await attaching.stub.Audit(pb.AuditRequest()) == pb.AuditResponse(silent_worker_uids=[UID])
    with pytest.raises(KvistError) as unknown, rpc_errors():
        async for _ in attaching.watch():
            pass
    assert unknown.value.code == "NOT_FOUND"
    attaching.engines.enter_cluster(3)
    await attaching.until(attaching.engines.descriptions)
    [described] = attaching.engines.descriptions()
    assert (described.worker_uid, described.name, described.model, described.namespace) == (UID, "stock", "m", "m")
    assert (described.ranks, described.block_size_tokens, described.incarnation > 0) == (1, 32, True)


async def test_its_history_is_served_as_a_worker_serves_its_own(attaching: Attaching, engine: FakeVllm) -> None:
    for payload in recorded()[:3]:
        await engine.publish(payload)
    attaching.engines.enter_cluster(3)
    await attaching.until(lambda: attaching.engines.descriptions() and attaching.number(names.ATTACHED_BLOCKS) == 4)
    await attaching.until(lambda: attaching.number(names.ATTACHED_HASH_CHECKS, outcome="verified") >= 4)
    assert attaching.number(names.ATTACHED_HASH_CHECKS, outcome="mismatched") == 0
    whole = [part.response.WhichOneof("part") async for part in attaching.watch()]
    assert whole == ["snapshot", "digest", "caught_up"]
    [digest] = (await attaching.stub.Audit(pb.AuditRequest())).digests
    assert digest.complete
    assert digest.source.worker_uid == UID
    incarnation = digest.source.incarnation
    from_start = [part.response async for part in attaching.watch(rank=0, incarnation=incarnation)]
    assert [part.batch.sequence for part in from_start if part.HasField("batch")] == [0, 1]
    rest = [part.response async for part in attaching.watch(rank=0, incarnation=incarnation, sequence=1)]
    assert [part.WhichOneof("part") for part in rest] == ["digest", "caught_up"]

    # Another start of the engine ends what follows the old one.
    following = attaching.watch(follow=True, rank=0, incarnation=incarnation, sequence=1)
    parts = aiter(following)
    while (await anext(parts)).response.WhichOneof("part") != "caught_up":
        pass
    engine.restart()
    with pytest.raises(KvistError) as ended, rpc_errors():
        while True:
            await anext(parts)
    assert ended.value.code == "ENGINE_UNAVAILABLE"
    [described] = attaching.engines.descriptions()
    assert described.incarnation > incarnation
    with pytest.raises(KvistError) as unknown, rpc_errors():
        request = engine_pb2.WatchKvEventsRequest(ranks=[1])
        async for _ in attaching.stub.WatchKvEvents(pb.WatchKvEventsRequest(worker_uid=UID, request=request)):
            pass
    assert unknown.value.code == "INVALID_ARGUMENT"


async def test_while_it_is_not_heard_its_account_is_not_said_to_be_whole(
    attaching: Attaching, engine: FakeVllm
) -> None:
    """R27."""
    await engine.publish(recorded()[0])
    attaching.engines.enter_cluster(3)
    await attaching.until(lambda: attaching.engines.descriptions() and attaching.number(names.ATTACHED_IN_TOUCH) == 1)
    engine.stop_answering()
    await attaching.until(lambda: attaching.number(names.ATTACHED_IN_TOUCH) == 0)
    [digest] = (await attaching.stub.Audit(pb.AuditRequest())).digests
    assert (digest.complete, digest.tiers[0].block_count) == (False, 3)
    assert attaching.number(names.ATTACHED_COMPLETE) == 1, "the ledger itself has missed nothing"


async def test_what_is_no_statement_is_counted_by_reason_and_changes_nothing(
    attaching: Attaching, engine: FakeVllm
) -> None:
    """R28: an event of another rank, and what is no event at all."""
    await engine.publish(recorded()[0])
    attaching.engines.enter_cluster(3)
    await attaching.until(lambda: attaching.engines.descriptions() and engine.subscribers)
    await attaching.until(lambda: attaching.number(names.ATTACHED_BLOCKS) == 3)
    for garbage in ([b"one frame"], [b"t", b"short", b""], [b"", b"", bytes(7), b"x"]):
        await engine.send(garbage)
    await attaching.until(lambda: attaching.number(names.ATTACHED_REFUSED, reason="not_a_message") == 3)
    # `[0.0, [], 9]`: a batch of a rank that is not read here.
    await engine.publish(b"\x93\xcb" + bytes(8) + b"\x90\x09")
    await attaching.until(lambda: attaching.number(names.ATTACHED_REFUSED, reason="another_rank") == 1)
    [digest] = (await attaching.stub.Audit(pb.AuditRequest())).digests
    assert (digest.complete, digest.tiers[0].block_count) == (False, 3)


async def test_each_rank_has_a_ledger_and_a_start_of_its_own(tmp_path: Path) -> None:
    async with two_ranks() as (first, second), attaching_to(first, tmp_path, ranks=2, first_rank=4) as attaching:
        await first.publish(of_rank(recorded()[0], 4))
        attaching.engines.enter_cluster(3)
        await attaching.until(lambda: first.questions and second.questions and attaching.engines.descriptions())
        await second.publish(of_rank(recorded()[0], 5))
        await second.publish(of_rank(recorded()[1], 5))
        [described] = attaching.engines.descriptions()

        async def digests() -> list[LedgerDigest]:
            return list((await attaching.stub.Audit(pb.AuditRequest())).digests)

        async def blocks() -> list[int]:
            return [sum(tier.block_count for tier in digest.tiers) for digest in await digests()]

        async with asyncio.timeout(LIMIT_SECONDS):
            while await blocks() != [3, 4]:
                await asyncio.sleep(0.01)
            assert [described.incarnation] * 2 == [digest.source.incarnation for digest in await digests()]
            assert [0, 1] == [digest.source.rank for digest in await digests()]
            second.restart()
            while await blocks() != [3, 0]:
                await asyncio.sleep(0.01)
        incarnations = [digest.source.incarnation for digest in await digests()]
        assert described.incarnation == incarnations[0] < incarnations[1]
        assert attaching.number(names.ATTACHED_REFUSED, reason="another_rank") == 0


def of_rank(payload: bytes, rank: int) -> bytes:
    """A recorded batch, which ends with the number of its rank, as one of another rank."""
    assert payload[-1] == 0
    return payload[:-1] + bytes([rank])
