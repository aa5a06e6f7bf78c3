"""Server and channel of the base package, over a real connection."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from prometheus_client import CollectorRegistry

from kvist import errors
from kvist.errors import FieldViolation, InvalidRequestError, KvistError, rpc_errors
from kvist.grpc import GrpcServer, Registration, open_channel
from kvist.kvmaster.v1 import kvmaster_pb2, kvmaster_pb2_grpc
from kvist.settings import ListenSettings

SERVICE = "kvist.kvmaster.v1.KvMasterService"


class Servicer(kvmaster_pb2_grpc.KvMasterServiceServicer):
    """Answers by name."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.metadata: dict[str, str] = {}

    async def Stats(self, request, context):  # noqa: N802
        self.metadata = dict(context.invocation_metadata())
        return kvmaster_pb2.StatsResponse(index_bytes=7)

    async def PutPrefix(self, request, context):  # noqa: N802
        match request.prefix.name:
            case "invalid":
                raise errors.invalid_field("prefix.name", "must not be 'invalid'")
            case "fault":
                raise RuntimeError("secret text")
            case "slow":
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled.set()
        return kvmaster_pb2.PutPrefixResponse()

    async def WatchSources(self, request, context):  # noqa: N802
        try:
            while True:
                yield kvmaster_pb2.WatchSourcesResponse()
                await asyncio.sleep(0)
        finally:
            self.cancelled.set()

    async def Bootstrap(self, request, context):  # noqa: N802
        yield kvmaster_pb2.BootstrapResponse()
        raise errors.error("OVERLOADED", "too many", retry_after_seconds=2.0)


@pytest.fixture
async def served() -> AsyncIterator[tuple[Servicer, GrpcServer, grpc.aio.Channel, CollectorRegistry]]:
    servicer, registry = Servicer(), CollectorRegistry()
    add = functools.partial(kvmaster_pb2_grpc.add_KvMasterServiceServicer_to_server, servicer)
    async with (
        asyncio.timeout(30),
        GrpcServer(ListenSettings(), services=[Registration(SERVICE, add)], registry=registry) as server,
        open_channel(server.address, retries=False) as channel,
    ):
        yield servicer, server, channel, registry


async def test_health_follows_the_process(served) -> None:
    _, server, channel, _ = served
    health = health_pb2_grpc.HealthStub(channel)

    async def states() -> list[int]:
        return [
            (await health.Check(health_pb2.HealthCheckRequest(service=name))).status
            for name in ("", "readiness", SERVICE, "liveness")
        ]

    assert await states() == [2, 2, 2, 1]
    await server.set_serving(True)
    assert await states() == [1, 1, 1, 1]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health.Check(health_pb2.HealthCheckRequest(service="none"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_names_the_services(served) -> None:
    _, server, _, _ = served

    def names() -> set[str]:
        with grpc.insecure_channel(server.address) as channel:
            return set(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert {SERVICE, "grpc.health.v1.Health"} <= await asyncio.to_thread(names)


async def test_an_error_arrives_as_it_was_raised(served) -> None:
    _, _, channel, registry = served
    stub = kvmaster_pb2_grpc.KvMasterServiceStub(channel)
    request = kvmaster_pb2.PutPrefixRequest(prefix=kvmaster_pb2.NamedPrefix(name="invalid"))
    with pytest.raises(InvalidRequestError) as caught, rpc_errors():
        await stub.PutPrefix(request)
    assert caught.value.fields == (FieldViolation("prefix.name", "must not be 'invalid'"),)
    labels = {"method": f"{SERVICE}/PutPrefix", "code": "INVALID_ARGUMENT"}
    assert registry.get_sample_value("kvist_grpc_server_calls_total", labels) == 1


async def test_a_fault_tells_nothing_to_the_caller(served) -> None:
    _, _, channel, _ = served
    stub = kvmaster_pb2_grpc.KvMasterServiceStub(channel)
    request = kvmaster_pb2.PutPrefixRequest(prefix=kvmaster_pb2.NamedPrefix(name="fault"))
    with pytest.raises(KvistError) as caught, rpc_errors():
        await stub.PutPrefix(request)
    assert caught.value.code == "INTERNAL"
    assert "secret" not in caught.value.message


async def test_a_stream_may_fail_after_messages(served) -> None:
    _, _, channel, _ = served
    stub = kvmaster_pb2_grpc.KvMasterServiceStub(channel)
    call = stub.Bootstrap(kvmaster_pb2.BootstrapRequest())
    assert await call.read() == kvmaster_pb2.BootstrapResponse()
    with pytest.raises(errors.OverloadedError) as caught, rpc_errors():
        await call.read()
    assert caught.value.retry_after_seconds == 2.0


async def test_an_unwritten_method_is_unimplemented(served) -> None:
    _, _, channel, _ = served
    stub = kvmaster_pb2_grpc.KvMasterServiceStub(channel)
    with pytest.raises(errors.UnsupportedError), rpc_errors():
        await stub.ListPrefixes(kvmaster_pb2.ListPrefixesRequest())


async def test_cancelling_reaches_the_handler(served) -> None:
    servicer, _, channel, registry = served
    stub = kvmaster_pb2_grpc.KvMasterServiceStub(channel)
    request = kvmaster_pb2.PutPrefixRequest(prefix=kvmaster_pb2.NamedPrefix(name="slow"))
    with pytest.raises(errors.DeadlineExceededError), rpc_errors():
        await stub.PutPrefix(request, timeout=0.2)
    await asyncio.wait_for(servicer.cancelled.wait(), 5)
    assert registry.get_sample_value("kvist_grpc_server_active_calls", {"method": f"{SERVICE}/PutPrefix"}) == 0


@pytest.mark.parametrize("messages", [0, 1, 50])
async def test_a_client_that_hangs_up_in_mid_stream_ends_the_call_without_a_word(served, caplog, messages) -> None:
    servicer, _, channel, registry = served
    call = kvmaster_pb2_grpc.KvMasterServiceStub(channel).WatchSources(kvmaster_pb2.WatchSourcesRequest())
    for _ in range(messages):
        await call.read()
    call.cancel()
    if messages:
        await servicer.cancelled.wait()
    labels = {"method": f"{SERVICE}/WatchSources"}
    while registry.get_sample_value("kvist_grpc_server_active_calls", labels):
        await asyncio.sleep(0.01)
    assert [] == [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_server_that_is_gone_is_unavailable(served) -> None:
    _, server, channel, _ = served
    await server.stop(grace_seconds=0)
    stub = kvmaster_pb2_grpc.KvMasterServiceStub(channel)
    with pytest.raises(errors.UnavailableError), rpc_errors():
        await stub.Stats(kvmaster_pb2.StatsRequest(), timeout=5)


async def test_a_taken_port_is_said(served) -> None:
    _, server, _, _ = served
    with pytest.raises(OSError, match="cannot listen"):
        async with GrpcServer(ListenSettings(listen=server.address), services=[], registry=CollectorRegistry()):
            pass


@contextlib.asynccontextmanager
async def server_with(**limits: float) -> AsyncIterator[GrpcServer]:
    add = functools.partial(kvmaster_pb2_grpc.add_KvMasterServiceServicer_to_server, Servicer())
    registration = Registration(SERVICE, add)
    async with (
        asyncio.timeout(30),
        GrpcServer(ListenSettings(**limits), services=[registration], registry=CollectorRegistry()) as server,
    ):
        yield server


@contextlib.asynccontextmanager
async def serving(**limits: float) -> AsyncIterator[kvmaster_pb2_grpc.KvMasterServiceStub]:
    async with server_with(**limits) as server, open_channel(server.address, retries=False) as channel:
        yield kvmaster_pb2_grpc.KvMasterServiceStub(channel)


def named(name: str) -> kvmaster_pb2.PutPrefixRequest:
    return kvmaster_pb2.PutPrefixRequest(prefix=kvmaster_pb2.NamedPrefix(name=name))


async def test_calls_of_one_method_are_bounded_and_the_others_go_on() -> None:
    async with serving(max_calls_at_once=16) as stub:
        slow = [asyncio.ensure_future(stub.PutPrefix(named("slow"))) for _ in range(16)]
        refusal = None
        while refusal is None:
            # Until all of them have begun.
            try:
                with rpc_errors():
                    await stub.PutPrefix(named("one"))
            except KvistError as failure:
                refusal = failure
        assert refusal.code == "OVERLOADED"
        assert refusal.retry_after_seconds == 1.0
        assert (await stub.Stats(kvmaster_pb2.StatsRequest())).index_bytes == 7
        for call in slow:
            call.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


async def test_a_connection_has_so_many_calls_open_and_others_are_not_concerned() -> None:
    async with (
        server_with(max_calls_at_once=16) as server,
        open_channel(server.address, retries=False) as full,
        open_channel(server.address, retries=False) as other,
    ):
        stub = kvmaster_pb2_grpc.KvMasterServiceStub(full)
        health = health_pb2_grpc.HealthStub(full)
        # Twice the room of a method; none of them has more than a host may have.
        streams = [health.Watch(health_pb2.HealthCheckRequest(service="liveness")) for _ in range(12)]
        streams += [stub.WatchSources(kvmaster_pb2.WatchSourcesRequest()) for _ in range(8)]
        for stream in streams:
            await stream.read()
        slow = [stub.PutPrefix(named("slow")) for _ in range(12)]
        # Its client holds it back.
        waiting = asyncio.ensure_future(stub.Stats(kvmaster_pb2.StatsRequest()))
        for _ in range(10):
            answer = await kvmaster_pb2_grpc.KvMasterServiceStub(other).Stats(kvmaster_pb2.StatsRequest())
            assert answer.index_bytes == 7
        assert not waiting.done()
        streams[0].cancel()
        assert (await waiting).index_bytes == 7
        for call in (*streams, *slow):
            call.cancel()


async def test_a_host_that_calls_too_often_is_told_to_come_back() -> None:
    async with serving(max_calls_per_second=0.5) as stub:
        with pytest.raises(KvistError) as caught, rpc_errors():
            for _ in range(3):
                await stub.PutPrefix(named("one"))
        assert caught.value.code == "OVERLOADED"
        assert 0 < caught.value.retry_after_seconds <= 2
        # Each method is counted by itself.
        assert (await stub.Stats(kvmaster_pb2.StatsRequest())).index_bytes == 7


async def test_a_message_that_is_too_large_is_refused() -> None:
    async with serving(max_message_bytes=64 * 1024) as stub:
        await stub.PutPrefix(named("x" * 60_000))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.PutPrefix(named("x" * 70_000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
