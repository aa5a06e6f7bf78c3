"""The admin server over a real socket: what probes and scrapers see."""

import asyncio

from prometheus_client import CollectorRegistry, Counter

from kvist.admin import AdminServer
from kvist.readiness import Readiness
from kvist.settings import split_address


async def fetch(address: str, head: str) -> tuple[int, dict[str, str], str]:
    async with asyncio.timeout(5):
        reader, writer = await asyncio.open_connection(*split_address(address))
        writer.write(head.encode() + b"\r\n\r\n")
        answer = (await reader.read()).decode()
        writer.close()
    start, _, rest = answer.partition("\r\n")
    headers, _, body = rest.partition("\r\n\r\n")
    return int(start.split()[1]), dict(line.split(": ", 1) for line in headers.split("\r\n")), body


async def test_readiness_names_every_reason() -> None:
    readiness = Readiness(store="not synced", bus="not connected")
    async with AdminServer("127.0.0.1:0", registry=CollectorRegistry(), readiness=readiness) as admin:
        status, _, body = await fetch(admin.address, "GET /readyz HTTP/1.1")
        assert (status, body) == (503, "bus: not connected\nstore: not synced\n")
        readiness.clear("bus")
        readiness.clear("store")
        status, _, body = await fetch(admin.address, "GET /readyz?verbose HTTP/1.1")
        assert (status, body) == (200, "ok\n")
        assert (await fetch(admin.address, "GET /livez HTTP/1.1"))[0] == 200
        assert (await fetch(admin.address, "POST /livez HTTP/1.1"))[0] == 405
        assert (await fetch(admin.address, "GET / HTTP/1.1"))[0] == 404


async def test_metrics_are_negotiated() -> None:
    registry = CollectorRegistry()
    Counter("kvist_test", "A counter.", registry=registry).inc()
    async with AdminServer("127.0.0.1:0", registry=registry, readiness=Readiness()) as admin:
        _, headers, body = await fetch(admin.address, "GET /metrics HTTP/1.1")
        assert headers["content-type"].startswith("text/plain")
        assert "kvist_test_total 1.0" in body
        assert "kvist_ready 1.0" in body
        _, headers, body = await fetch(admin.address, "GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text")
        assert headers["content-type"].startswith("application/openmetrics-text")
        assert body.endswith("# EOF\n")
        _, headers, body = await fetch(admin.address, "HEAD /metrics HTTP/1.1")
        assert int(headers["content-length"]) > 0
        assert body == ""


async def test_closing_does_not_wait_for_silent_connections() -> None:
    async with asyncio.timeout(5):
        async with AdminServer("127.0.0.1:0", registry=CollectorRegistry(), readiness=Readiness()) as admin:
            reader, writer = await asyncio.open_connection(*split_address(admin.address))
            writer.write(b"GET /livez")
            await writer.drain()
            address = admin.address
            assert (await fetch(address, "GET /livez HTTP/1.1"))[0] == 200
        assert await reader.read() == b""
        writer.close()
