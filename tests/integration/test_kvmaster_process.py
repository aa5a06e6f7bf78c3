"""A KV master process and its controllers."""

import asyncio
import functools
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvist.controller.v1 import controller_pb2 as pb
from kvist.controller.v1.controller_pb2_grpc import ControllerServiceServicer, add_ControllerServiceServicer_to_server
from kvist.grpc import GrpcServer, Registration
from kvist.settings import ListenSettings
from support.nats_security import make_certificate

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by the openssl command"),
]
SECONDS = 40


class Controller(ControllerServiceServicer):
    """Notes who watches."""

    def __init__(self) -> None:
        self.subscribers: asyncio.Queue[str] = asyncio.Queue()

    async def WatchCluster(  # noqa: N802
        self, request: pb.WatchClusterRequest, context: object
    ) -> AsyncIterator[pb.WatchClusterResponse]:
        self.subscribers.put_nowait(request.subscriber)
        yield pb.WatchClusterResponse()
        await asyncio.Event().wait()


async def test_it_follows_a_controller_whose_authority_it_was_told(tmp_path: Path) -> None:
    certificate, controller = make_certificate(tmp_path), Controller()
    listen = ListenSettings(tls_certificate_file=certificate.file, tls_key_file=certificate.key_file)
    add = functools.partial(add_ControllerServiceServicer_to_server, controller)
    async with (
        asyncio.timeout(SECONDS),
        GrpcServer(
            listen, services=[Registration("kvist.controller.v1.ControllerService", add)], registry=CollectorRegistry()
        ) as server,
    ):
        settings = {
            "name": "kvmaster-7",
            "controllers": server.address,
            "controller_tls_ca_file": certificate.ca_file,
            # Nobody listens there, which is no reason not to start.
            "bus.urls": "nats://127.0.0.1:9",
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvist_kvmaster"),
            *(part for name, value in settings.items() for part in ("--set", f"{name}={value}")),
        )
        try:
            assert await controller.subscribers.get() == "kvmaster-7"
            process.terminate()
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
