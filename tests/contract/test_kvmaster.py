"""The KV master over gRPC, with an index that is a script."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvist.errors import KvistError, rpc_errors
from kvist.events.v1.events_pb2 import SOURCE_STATE_EXACT, SourceId
from kvist.grpc import GrpcServer, Registration, open_channel
from kvist.kvmaster.v1 import kvmaster_pb2 as pb
from kvist.kvmaster.v1.kvmaster_pb2_grpc import KvMasterServiceStub, add_KvMasterServiceServicer_to_server
from kvist.router.v1.router_pb2 import SourceStatus
from kvist.settings import ListenSettings, StoreSettings
from kvist.store import Put
from kvist.store.sqlite import SqliteStore
from kvist_kvmaster.app import SERVICE_NAME
from kvist_kvmaster.catalogue import MOST_BLOCKS
from kvist_kvmaster.service import KvMasterService
from kvist_kvmaster.standing import Standing

LIMIT_SECONDS = 20


class ScriptedIndex:
    def __init__(self) -> None:
        self.sources: list[SourceStatus] = []
        self.asked: list[pb.LookupRequest] = []

    def lookup(self, request: bytes) -> bytes:
        self.asked.append(pb.LookupRequest.FromString(request))
        return pb.LookupResponse(prompt_blocks=3).SerializeToString()

    def stats(self) -> bytes:
        return pb.StatsResponse(sources=self.sources, index_bytes=7).SerializeToString()

    def bootstrap(self, worker_uids: list[str]) -> "ScriptedSnapshots":
        return ScriptedSnapshots(worker_uids or ["a", "b"])


class ScriptedSnapshots:
    def __init__(self, worker_uids: list[str]) -> None:
        self._left = [
            *(
                [
                    pb.BootstrapResponse(snapshot={"source": {"worker_uid": uid}, "last": is_last})
                    for is_last in (False, True)
                ]
                for uid in worker_uids
            ),
            [pb.BootstrapResponse(done={"sources": len(worker_uids)})],
        ]

    def next_parts(self) -> list[bytes]:
        return [part.SerializeToString() for part in self._left.pop(0)] if self._left else []


@pytest.fixture
async def served() -> AsyncIterator[tuple[ScriptedIndex, KvMasterService, KvMasterServiceStub]]:
    index = ScriptedIndex()
    service = KvMasterService(index, Standing(None, cluster="test", name="alone", lease_seconds=2))
    add = functools.partial(add_KvMasterServiceServicer_to_server, service)
    async with (
        asyncio.timeout(LIMIT_SECONDS),
        GrpcServer(
            ListenSettings(), services=[Registration(SERVICE_NAME, add)], registry=CollectorRegistry()
        ) as server,
        open_channel(server.address, retries=False) as channel,
    ):
        yield index, service, KvMasterServiceStub(channel)


async def refused(call: object) -> KvistError:
    with pytest.raises(KvistError) as caught, rpc_errors():
        await call
    return caught.value


async def test_nothing_is_answered_before_the_first_sync(served) -> None:
    index, service, stub = served
    request = pb.LookupRequest(blocks=pb.BlockHashes(hashes=[1]))
    assert (await refused(stub.Lookup(request))).code == "NOT_READY"
    service.set_synced()
    response = await stub.Lookup(request)
    assert (response.prompt_blocks, response.answered_by) == (3, pb.INSTANCE_ROLE_LEADER)
    assert index.asked == [request]


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({}, "prompt"),
        ({"tokens": {"ids": [1]}, "namespace": "m"}, "block_size_tokens"),
        ({"tokens": {"ids": [1]}, "block_size_tokens": 16}, "namespace"),
    ],
)
async def test_an_incomplete_lookup_is_refused_by_field(served, request_fields: dict, field: str) -> None:
    _, _, stub = served
    failure = await refused(stub.Lookup(pb.LookupRequest(**request_fields)))
    assert (failure.code, [violation.field for violation in failure.fields]) == ("INVALID_ARGUMENT", [field])


async def test_a_bootstrap_ends_with_the_number_of_its_sources(served) -> None:
    _, service, stub = served
    service.set_synced()
    parts = [part async for part in stub.Bootstrap(pb.BootstrapRequest())]
    assert [part.WhichOneof("part") for part in parts] == ["snapshot"] * 4 + ["done"]
    assert parts[-1].done.sources == 2


async def test_a_watch_gives_all_sources_then_changes_and_removals(served) -> None:
    index, service, stub = served
    service.set_synced()
    first = SourceStatus(source=SourceId(worker_uid="a", incarnation=1), state=SOURCE_STATE_EXACT)
    second = SourceStatus(source=SourceId(worker_uid="b", incarnation=1), state=SOURCE_STATE_EXACT)
    index.sources = [first]
    call = stub.WatchSources(pb.WatchSourcesRequest())
    assert list((await call.read()).sources) == [first]
    index.sources = [second]
    change = await call.read()
    assert list(change.sources) == [second]
    assert list(change.removed) == [first.source]


async def test_alone_without_a_store_it_leads_and_has_no_prefixes(served) -> None:
    _, _, stub = served
    stats = await stub.Stats(pb.StatsRequest())
    assert (stats.role, stats.index_bytes) == (pb.INSTANCE_ROLE_LEADER, 7)
    for call in (
        stub.PutPrefix(pb.PutPrefixRequest()),
        stub.ListPrefixes(pb.ListPrefixesRequest()),
        stub.DeletePrefix(pb.DeletePrefixRequest()),
    ):
        assert (await refused(call)).code == "NOT_IMPLEMENTED"


@contextlib.asynccontextmanager
async def instance(store: Path, name: str) -> AsyncIterator[tuple[Standing, KvMasterServiceStub]]:
    """A KV master that takes part in the election of a store."""
    standing = Standing(StoreSettings(path=store), cluster="test", name=name, lease_seconds=1)
    service = KvMasterService(ScriptedIndex(), standing)
    service.set_synced()
    add = functools.partial(add_KvMasterServiceServicer_to_server, service)
    async with (
        GrpcServer(
            ListenSettings(), services=[Registration(SERVICE_NAME, add)], registry=CollectorRegistry()
        ) as server,
        open_channel(server.address, retries=False) as channel,
        asyncio.TaskGroup() as group,
    ):
        running = group.create_task(standing.run())
        try:
            yield standing, KvMasterServiceStub(channel)
        finally:
            running.cancel()


async def until_role(stub: KvMasterServiceStub, role: int) -> pb.StatsResponse:
    while (stats := await stub.Stats(pb.StatsRequest())).role != role:
        await asyncio.sleep(0.01)
    return stats


def put(name: str, *hashes: int, **fields: object) -> pb.PutPrefixRequest:
    return pb.PutPrefixRequest(prefix=pb.NamedPrefix(name=name, namespace="m", block_hashes=hashes, **fields))


async def test_the_leader_writes_the_catalogue_and_the_standby_reads_it_and_takes_over(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    async with asyncio.timeout(LIMIT_SECONDS), contextlib.AsyncExitStack() as stack:
        leaving = await stack.enter_async_context(contextlib.AsyncExitStack())
        _, first = await leaving.enter_async_context(instance(path, "first"))
        fence = (await until_role(first, pb.INSTANCE_ROLE_LEADER)).fence
        standing, second = await stack.enter_async_context(instance(path, "second"))
        stats = await until_role(second, pb.INSTANCE_ROLE_STANDBY)
        assert stats.fence == 0

        written = (await first.PutPrefix(put("greeting", 1, 2, description="hello"))).prefix
        assert written.updated_at.ToNanoseconds() > 0
        again = (await first.PutPrefix(put("greeting", 1, 2, description="hello"))).prefix
        assert written == again, "equal content was written again"
        await first.PutPrefix(put("farewell", 3))
        assert ["farewell", "greeting"] == [
            p.name for p in (await first.ListPrefixes(pb.ListPrefixesRequest())).prefixes
        ]

        while len(seen := (await second.ListPrefixes(pb.ListPrefixesRequest())).prefixes) < 2:
            await asyncio.sleep(0.01)
        assert written == seen[1]
        failure = await refused(second.PutPrefix(put("x", 1)))
        assert (failure.code, failure.metadata["leader"]) == ("NOT_READY", "first")
        assert (await second.Lookup(pb.LookupRequest(blocks={"hashes": [1]}))).answered_by == pb.INSTANCE_ROLE_STANDBY

        await leaving.aclose()
        assert (await until_role(second, pb.INSTANCE_ROLE_LEADER)).fence > fence
        await second.DeletePrefix(pb.DeletePrefixRequest(name="farewell"))
        await second.DeletePrefix(pb.DeletePrefixRequest(name="farewell"))
        assert ["greeting"] == [p.name for p in (await second.ListPrefixes(pb.ListPrefixesRequest())).prefixes]
        assert standing.leader_name == "second"


async def test_prefixes_come_by_page_and_wrong_ones_are_refused_by_field(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_SECONDS), instance(tmp_path / "state.sqlite", "one") as (_, stub):
        await until_role(stub, pb.INSTANCE_ROLE_LEADER)
        for number in range(5):
            await stub.PutPrefix(put(f"p{number}", number + 1))
        names: list[str] = []
        token = ""
        while True:
            page = await stub.ListPrefixes(pb.ListPrefixesRequest(page_size=2, page_token=token))
            names += [prefix.name for prefix in page.prefixes]
            token = page.next_page_token
            if not token:
                break
        assert [f"p{number}" for number in range(5)] == names
        bad = pb.PutPrefixRequest(prefix=pb.NamedPrefix(name="a/b", block_hashes=[1] * (MOST_BLOCKS + 1)))
        failure = await refused(stub.PutPrefix(bad))
        assert ["prefix.name", "prefix.namespace", "prefix.block_hashes"] == [item.field for item in failure.fields]
        assert (await refused(stub.DeletePrefix(pb.DeletePrefixRequest(name="")))).code == "INVALID_ARGUMENT"


async def test_a_leader_that_was_deposed_writes_nothing_whatever_it_believes(tmp_path: Path) -> None:
    """Its lease was given to another one while it stood still."""
    path = tmp_path / "state.sqlite"
    async with asyncio.timeout(LIMIT_SECONDS), instance(path, "old") as (standing, stub), SqliteStore(path) as store:
        await until_role(stub, pb.INSTANCE_ROLE_LEADER)
        key = "/kvist/test/v1/elections/kvmaster"
        claim = await store.get(key)
        assert claim is not None
        leadership = standing.leadership
        assert leadership is not None
        assert standing.catalogue is not None
        new_lease = await store.grant_lease(60)
        await store.commit([Put(key, b"new", new_lease)])
        await store.delete(key)
        await store.commit([Put(key, b"new", new_lease)])
        with pytest.raises(KvistError) as caught:
            await standing.catalogue.put(put("late", 1).prefix, leadership)
        assert caught.value.code == "STALE_FENCE"
        assert not (await store.list("/kvist/test/v1/prefixes/")).items
