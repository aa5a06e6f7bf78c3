"""The KV master over gRPC, with an index that is a script."""

import asyncio
import functools
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from kvist.errors import KvistError, rpc_errors
from kvist.events.v1.events_pb2 import SOURCE_STATE_EXACT, SourceId
from kvist.grpc import GrpcServer, Registration, open_channel
from kvist.kvmaster.v1 import kvmaster_pb2 as pb
from kvist.kvmaster.v1.kvmaster_pb2_grpc import KvMasterServiceStub, add_KvMasterServiceServicer_to_server
from kvist.router.v1.router_pb2 import SourceStatus
from kvist.settings import ListenSettings
from kvist_kvmaster.app import SERVICE_NAME
from kvist_kvmaster.service import KvMasterService

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
    service = KvMasterService(index)
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


async def test_stats_state_the_role_and_prefixes_are_not_supported(served) -> None:
    _, _, stub = served
    stats = await stub.Stats(pb.StatsRequest())
    assert (stats.role, stats.index_bytes) == (pb.INSTANCE_ROLE_LEADER, 7)
    for call in (
        stub.PutPrefix(pb.PutPrefixRequest()),
        stub.ListPrefixes(pb.ListPrefixesRequest()),
        stub.DeletePrefix(pb.DeletePrefixRequest()),
    ):
        assert (await refused(call)).code == "NOT_IMPLEMENTED"
