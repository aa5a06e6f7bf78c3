"""A whole mesh behind locked doors: every connection is mutual TLS, with certificates of `kvist certs init`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from kvist.certificates import ROLES, CertificateFolder
from kvist.controller.v1 import controller_pb2 as pb
from kvist.controller.v1.controller_pb2_grpc import ControllerServiceStub
from kvist.engine.v1.engine_pb2 import DescribeRequest
from kvist.engine.v1.engine_pb2_grpc import EngineServiceStub
from kvist.events.v1.events_pb2 import SOURCE_STATE_EXACT
from kvist.grpc import open_channel
from kvist.kvmaster.v1.kvmaster_pb2 import StatsRequest
from kvist.kvmaster.v1.kvmaster_pb2_grpc import KvMasterServiceStub
from kvist.nats_accounts import NatsFolder
from kvist.router.v1.router_pb2 import ListTargetsRequest
from kvist.router.v1.router_pb2_grpc import RouterServiceStub
from support.certificates import authority, files_of
from support.mesh import CALL_SECONDS, Mesh, until
from support.nats_process import NatsProcess
from support.scrape import scrape

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SECONDS = 120
CLUSTER = "locked"
PROMPT = [{"role": "user", "content": "Say something."}]


def listener(pki: CertificateFolder, role: str, prefix: str = "") -> dict[str, object]:
    """Settings of a server of a role that asks for certificates."""
    return {
        f"{prefix}tls_certificate_file": pki.certificate_file(role),
        f"{prefix}tls_key_file": pki.key_file(role),
        f"{prefix}tls_client_ca_file": pki.certificate_file("ca"),
    }


@contextlib.asynccontextmanager
async def locked_mesh(folder: Path) -> AsyncIterator[tuple[Mesh, CertificateFolder]]:
    pki = authority(folder / "pki")
    bus = NatsFolder(folder / "bus")
    bus.write(cluster=CLUSTER, tls=(pki.certificate_file("nats"), pki.key_file("nats")))
    mesh = Mesh(folder)
    mesh.nats = NatsProcess(folder, configuration=bus.configuration_file.read_text())
    calls = {"tls_ca_file": pki.certificate_file("ca")}

    def events(role: str) -> dict[str, object]:
        return {
            "bus.urls": mesh.nats.url,
            "bus.credentials_file": bus.credentials_file(role),
            "bus.tls_ca_file": pki.certificate_file("ca"),
        }

    try:
        await mesh.nats.start()
        own = {"cluster": CLUSTER, "store.path": folder / "state.sqlite"}
        await mesh.start_service("controller", "controller", {**own, **calls, **listener(pki, "controller", "grpc.")})
        common = {**calls, "controllers": mesh.services["controller"].address}
        await mesh.start_service(
            "kvmaster",
            "kvmaster",
            {**common, **events("kvmaster"), **listener(pki, "kvmaster", "grpc."), "cluster": CLUSTER},
        )
        await mesh.start_service(
            "agent-0",
            "agent",
            {
                **common,
                **events("agent"),
                **listener(pki, "agent", "grpc."),
                **listener(pki, "worker", "workers."),
                "state_folder": folder / "agent-0",
                "workers.stop_on_exit": "true",
            },
        )
        router = {"kvmasters": mesh.services["kvmaster"].address, "drain_seconds": 1}
        await mesh.start_service(
            "router", "router", {**common, **events("router"), **listener(pki, "router"), **router}
        )
        yield mesh, pki
    except BaseException:
        print("\n".join(f"--- {name}\n{mesh.log(name)}" for name in mesh.services))
        raise
    finally:
        await mesh.close()


async def kvist(pki: CertificateFolder, role: str, *arguments: str) -> tuple[int, str]:
    """Runs a command with a role's certificate; its exit code and what it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvist.cli",
        f"--tls-ca={pki.certificate_file('ca')}",
        f"--tls-cert={pki.certificate_file(role)}", f"--tls-key={pki.key_file(role)}", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    return process.returncode or 0, output.decode()


def chat(url: str, context: ssl.SSLContext) -> list[dict[str, Any]]:
    """The events of a streamed answer."""
    body = {"model": "sim", "messages": PROMPT, "max_tokens": 16, "stream": True}
    request = urllib.request.Request(  # noqa: S310  It is https.
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS, context=context) as answer:  # noqa: S310
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix(b"data: ").strip() for line in answer if line.startswith(b"data: ")]
    assert lines.pop() == b"[DONE]"
    return [json.loads(line) for line in lines]


async def first_worker(mesh: Mesh, pki: CertificateFolder) -> str:
    """Address of a worker that serves."""
    async with open_channel(
        mesh.services["controller"].address, tls=files_of(pki, "operator"), retries=False
    ) as channel:
        stub = ControllerServiceStub(channel)
        async with asyncio.timeout(SECONDS):
            while True:
                listed = await stub.ListNodes(pb.ListNodesRequest(), timeout=CALL_SECONDS)
                ready = [worker for node in listed.nodes for worker in node.workers if worker.address]
                if ready:
                    return ready[0].address
                await asyncio.sleep(0.1)


async def until_exact(mesh: Mesh, pki: CertificateFolder) -> None:
    """Waits until the KV master knows all of the worker's blocks: that took NATS, the relay and the catch-up."""
    async with open_channel(mesh.services["kvmaster"].address, tls=files_of(pki, "operator"), retries=False) as channel:
        stub = KvMasterServiceStub(channel)
        async with asyncio.timeout(SECONDS):
            while True:
                stats = await stub.Stats(StatsRequest(), timeout=CALL_SECONDS)
                if [SOURCE_STATE_EXACT] == [source.state for source in stats.sources]:
                    return
                await asyncio.sleep(0.1)


async def until_routable(mesh: Mesh, pki: CertificateFolder) -> None:
    """Waits until the router would send a request to the worker."""
    async with open_channel(mesh.services["router"].address, tls=files_of(pki, "operator"), retries=False) as channel:
        stub = RouterServiceStub(channel)
        async with asyncio.timeout(SECONDS):
            while True:
                listed = await stub.ListTargets(ListTargetsRequest(), timeout=CALL_SECONDS)
                if [""] == [target.excluded_reason for target in listed.targets]:
                    return
                await asyncio.sleep(0.1)


async def test_a_mesh_of_locked_doors_serves_and_keeps_its_secrets(tmp_path: Path) -> None:
    manifest = tmp_path / "service.yaml"
    manifest.write_text(
        json.dumps(
            {
                "apiVersion": "kvist.dev/v1alpha1",
                "kind": "ModelService",
                "metadata": {"name": "sim"},
                "spec": {"engine": {"name": "sim"}, "drainTimeout": "1s"},
            }
        )
    )
    async with locked_mesh(tmp_path) as (mesh, pki):
        controller = mesh.services["controller"].address
        apply = ("apply", "-f", str(manifest), "--controller", controller)
        # Whoever is not an operator changes nothing, and is told why.
        for role in ("worker", "router", "client"):
            code, output = await kvist(pki, role, *apply)
            assert code == 6, output
            assert f"the role {role} may not call kvist.controller.v1.ControllerService/Apply" in output
        code, output = await kvist(pki, "operator", *apply)
        assert code == 0, output

        address = await first_worker(mesh, pki)
        await until_exact(mesh, pki)
        await until_routable(mesh, pki)
        context = ssl.create_default_context(cafile=str(pki.certificate_file("ca")))
        url = f"https://{mesh.services['router'].addresses['http_address']}"
        events = await asyncio.to_thread(chat, url, context)
        text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        assert text
        assert [choice["finish_reason"] for event in events for choice in event["choices"]][-1] == "length"
        # Nobody who does not trust the authority is spoken to, and plain text is not spoken.
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            await asyncio.to_thread(chat, url, ssl.create_default_context())
        code, output = await kvist(pki, "operator", "kv", "status", *(
            f"--{name}={mesh.services[name].address}" for name in ("router", "kvmaster", "controller")
        ))  # fmt: skip
        assert code == 0, output
        assert "EQUAL" in output or "MOVING" in output

        # A worker's port is no way round the router.
        for role, expected in (("client", grpc.StatusCode.PERMISSION_DENIED), ("router", grpc.StatusCode.OK)):
            async with open_channel(address, tls=files_of(pki, role), retries=False) as channel:
                call = EngineServiceStub(channel).Describe(DescribeRequest(), timeout=CALL_SECONDS)
                assert await call.code() is expected
        for service in mesh.services.values():
            async with open_channel(service.address, retries=False) as channel:
                call = EngineServiceStub(channel).Describe(DescribeRequest(), timeout=CALL_SECONDS)
                assert await call.code() is grpc.StatusCode.UNAVAILABLE, service.name

        for name, listener in (("controller", "grpc"), ("kvmaster", "grpc"), ("agent-0", "grpc"), ("router", "http")):
            metrics = await scrape(mesh.services[name].admin_address)
            assert metrics[f"kvist_tls_certificate_expiry_timestamp_seconds {listener}"] > time.time(), name
        assert_secrets_are_kept(tmp_path, pki)
        # A new authority for all, while everything runs.
        await rotate(mesh, pki, tmp_path)
        context = ssl.create_default_context(cafile=str(pki.certificate_file("ca")))
        await until("the edge has its new certificate", lambda: can_connect(url, context))
        assert await asyncio.to_thread(chat, url, context)


def can_connect(url: str, context: ssl.SSLContext) -> bool:
    with (
        contextlib.suppress(urllib.error.URLError),
        urllib.request.urlopen(  # noqa: S310
            f"{url}/v1/models", timeout=CALL_SECONDS, context=context
        ),
    ):
        return True
    return False


async def rotate(mesh: Mesh, pki: CertificateFolder, folder: Path) -> None:
    """Replaces all files by those of another authority."""
    new = authority(folder / "new")
    for file in new.path.iterdir():
        file.replace(pki.path / file.name)
    for name in ("controller", "kvmaster", "agent-0"):
        async with open_channel(mesh.services[name].address, tls=files_of(pki, "operator"), retries=False) as channel:
            call = EngineServiceStub(channel).Describe(DescribeRequest(), timeout=CALL_SECONDS)
            # The new authority is taken; the service is another one.
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED, name


def assert_secrets_are_kept(folder: Path, pki: CertificateFolder) -> None:
    """No key and no seed in a log, in what a process writes, or in a list of processes."""
    secrets = [pki.key_file(role).read_text().splitlines()[1] for role in ("ca", *ROLES)]
    secrets += [
        next(line for line in file.read_text().splitlines() if line.startswith("SU"))
        for file in (folder / "bus").glob("*.creds")
    ]
    owned = {folder / "pki", folder / "bus"}
    written = [path for path in folder.rglob("*") if path.is_file() and not owned & set(path.parents)]
    assert any(path.name == "router.log" for path in written)
    assert any(path.name == "worker.log" for path in written)
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    for secret in secrets:
        for path in written:
            assert secret.encode() not in path.read_bytes(), path
        assert not any(secret in command for command in commands)
