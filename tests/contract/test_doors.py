"""The doors of Python's servers: the table of the core, real sockets, certificates that come and go."""

import asyncio
import functools
import json
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog.testing
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from kvist import _core, errors
from kvist.agent.v1 import agent_pb2_grpc
from kvist.certificates import ROLES, CertificateFolder
from kvist.controller.v1 import controller_pb2_grpc
from kvist.engine.v1 import engine_pb2_grpc
from kvist.grpc import Channels, GrpcServer, Registration, open_channel
from kvist.kvmaster.v1 import kvmaster_pb2, kvmaster_pb2_grpc
from kvist.router.v1 import router_pb2_grpc
from kvist.settings import ListenSettings
from support.certificates import authority, expired, files_of

SECONDS = 30
TABLE = [(f"{row['service']}/{row['method']}", frozenset(row["roles"])) for row in json.loads(_core.access_table())]
SERVICES = {
    "kvist.agent.v1.AgentService": agent_pb2_grpc,
    "kvist.controller.v1.ControllerService": controller_pb2_grpc,
    "kvist.engine.v1.EngineService": engine_pb2_grpc,
    "kvist.kvmaster.v1.KvMasterService": kvmaster_pb2_grpc,
    "kvist.router.v1.RouterService": router_pb2_grpc,
}


class Steady(kvmaster_pb2_grpc.KvMasterServiceServicer):
    """Streams for as long as it is listened to."""

    async def WatchSources(self, request, context):  # noqa: N802
        while True:
            yield kvmaster_pb2.WatchSourcesResponse()
            await asyncio.sleep(0.05)


def registrations() -> list[Registration]:
    """Every service of Kvist, without behaviour, except for one stream."""
    found = []
    for name, module in SERVICES.items():
        short = name.rpartition(".")[2]
        servicer = Steady() if short == "KvMasterService" else getattr(module, f"{short}Servicer")()
        found.append(Registration(name, functools.partial(getattr(module, f"add_{short}Servicer_to_server"), servicer)))
    return found


def settings(own: CertificateFolder, *, client_ca: Path | None, **others: Any) -> ListenSettings:
    return ListenSettings(
        tls_certificate_file=own.certificate_file("controller"),
        tls_key_file=own.key_file("controller"),
        tls_client_ca_file=client_ca,
        **others,
    )


@asynccontextmanager
async def served(listen: ListenSettings) -> AsyncIterator[GrpcServer]:
    async with (
        asyncio.timeout(SECONDS),
        GrpcServer(listen, services=registrations(), registry=CollectorRegistry()) as server,
    ):
        yield server


async def outcome(channel: grpc.aio.Channel, method: str) -> errors.KvistError:
    call = channel.unary_unary(f"/{method}", request_serializer=bytes, response_deserializer=bytes)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"", timeout=SECONDS)
    return errors.from_rpc_error(caught.value)


async def is_let_in(channel: grpc.aio.Channel) -> bool:
    code = await health_code(channel)
    assert code in {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    return code is grpc.StatusCode.OK


async def health_code(channel: grpc.aio.Channel) -> grpc.StatusCode:
    return await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS / 2).code()


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_may_call_what_the_table_says_and_nothing_else(tmp_path: Path, role: str) -> None:
    pki = authority(tmp_path)
    async with (
        served(settings(pki, client_ca=pki.certificate_file("ca"))) as server,
        open_channel(server.address, tls=files_of(pki, role), retries=False) as channel,
    ):
        for method, roles in TABLE:
            if role in roles and method.endswith("/WatchSources"):
                continue  # It answers, for ever.
            failure = await outcome(channel, method)
            # An empty message may be refused by the service, but not by the door.
            assert (failure.code == "PERMISSION_DENIED") == (role not in roles), (method, failure)
            if role not in roles:
                assert failure.metadata["role"] == role
                assert failure.metadata["method"] == method
                assert frozenset(failure.metadata["allowed_roles"].split(",")) == roles
                assert method in failure.message


def test_the_table_has_a_row_for_each_method_of_each_service() -> None:
    methods = set()
    for name in SERVICES:
        package, _, short = name.rpartition(".")
        area = package.split(".")[1]
        module = __import__(f"kvist.{area}.v1.{area}_pb2", fromlist=["DESCRIPTOR"])
        methods |= {f"{name}/{method.name}" for method in module.DESCRIPTOR.services_by_name[short].methods}
    assert methods == {method for method, _ in TABLE}


async def test_strangers_old_certificates_and_none_are_not_let_in(tmp_path: Path) -> None:
    pki, stranger = authority(tmp_path / "pki"), authority(tmp_path / "stranger")
    shutil.copytree(tmp_path / "pki", tmp_path / "old")
    old = expired(tmp_path / "old")
    async with served(settings(pki, client_ca=pki.certificate_file("ca"))) as server:
        for own, expected in ((pki, True), (stranger, False), (old, False)):
            async with open_channel(server.address, tls=files_of(own, "router", ca=pki), retries=False) as channel:
                assert await is_let_in(channel) == expected
        async with open_channel(server.address, retries=False) as channel:
            assert not await is_let_in(channel)
        # A client that trusts somebody else says nothing here.
        async with open_channel(server.address, tls=files_of(pki, "router", ca=stranger), retries=False) as channel:
            assert not await is_let_in(channel)


async def test_without_authorities_of_clients_everything_is_open(tmp_path: Path) -> None:
    pki = authority(tmp_path)
    async with (
        served(settings(pki, client_ca=None)) as server,
        open_channel(server.address, tls=files_of(pki, "worker"), retries=False) as channel,
    ):
        for method in ("kvist.controller.v1.ControllerService/Apply", "kvist.agent.v1.AgentService/StartWorker"):
            assert (await outcome(channel, method)).code == "NOT_IMPLEMENTED"


async def test_health_and_reflection_are_open_or_for_operators(tmp_path: Path) -> None:
    pki = authority(tmp_path)
    ca = pki.certificate_file("ca")
    for services, roles in (((), {"operator"}), (("health",), set(ROLES))):
        async with served(settings(pki, client_ca=ca, open_services=services)) as server:
            for role in ("worker", "operator"):
                async with open_channel(server.address, tls=files_of(pki, role), retries=False) as channel:
                    code = await health_code(channel)
                    assert code is (grpc.StatusCode.OK if role in roles else grpc.StatusCode.PERMISSION_DENIED)


async def test_plain_text_at_an_encrypted_door_ends_at_once(tmp_path: Path) -> None:
    pki = authority(tmp_path)
    async with served(settings(pki, client_ca=None)) as server:
        reader, writer = await asyncio.open_connection(*server.address.split(":"))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        async with asyncio.timeout(4):
            assert len(await reader.read()) < 64
        writer.close()


async def test_who_never_speaks_is_shown_out(tmp_path: Path) -> None:
    pki = authority(tmp_path)
    async with served(settings(pki, client_ca=None)) as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port))) as silent:
            silent.settimeout(SECONDS)
            assert await asyncio.to_thread(silent.recv, 1) == b""


async def test_certificates_are_replaced_under_a_stream_that_runs(tmp_path: Path) -> None:
    pki, new = authority(tmp_path / "pki"), authority(tmp_path / "new")
    files = files_of(pki, "operator")
    async with (
        served(settings(pki, client_ca=pki.certificate_file("ca"))) as server,
        Channels([server.address], tls=files) as channels,
    ):
        stream = kvmaster_pb2_grpc.KvMasterServiceStub(channels[0]).WatchSources(kvmaster_pb2.WatchSourcesRequest())
        assert isinstance(await stream.read(), kvmaster_pb2.WatchSourcesResponse)
        async with open_channel(server.address, tls=files_of(new, "operator"), retries=False) as stranger:
            assert not await is_let_in(stranger)
        before = files.credentials()
        assert channels[0] is channels[0]
        for file in new.path.iterdir():
            shutil.copy(file, pki.path / file.name)
        assert files.credentials() != before
        async with open_channel(server.address, tls=files_of(new, "operator"), retries=False) as channel:
            assert await is_let_in(channel)
        # The stream was opened before, and is the same one still; whoever asks for a channel now gets a new one.
        for _ in range(3):
            assert isinstance(await stream.read(), kvmaster_pb2.WatchSourcesResponse)
        stream.cancel()
        assert await is_let_in(channels[0])


async def test_plain_text_off_loopback_is_warned_of_at_each_start() -> None:
    for listen, warnings in (("0.0.0.0:0", 1), ("127.0.0.1:0", 0)):
        with structlog.testing.capture_logs() as lines:
            async with served(ListenSettings(listen=listen, insecure=True)):
                pass
        assert [line["event"] for line in lines].count("plain_text_off_loopback") == warnings


def test_a_wrong_role_pattern_is_said_at_the_start(tmp_path: Path) -> None:
    pki = authority(tmp_path)
    listen = settings(pki, client_ca=pki.certificate_file("ca"), tls_role_uri="nonsense")
    with pytest.raises(errors.InvalidRequestError, match="tls_role_uri"):
        GrpcServer(listen, services=[], registry=CollectorRegistry())
