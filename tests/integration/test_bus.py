"""The bus on a real NATS server, with outages."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvist.bus import Bus, subject
from kvist.events.v1 import events_pb2
from kvist.settings import BusSettings
from support.nats_process import NatsProcess, nats_process

pytestmark = pytest.mark.integration


def open_bus(url: str, name: str, registry: CollectorRegistry | None = None) -> Bus:
    registry = registry or CollectorRegistry()
    return Bus(BusSettings(urls=(url,)), cluster="test", client_name=name, registry=registry)


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.02)


async def test_a_tombstone_is_heard(tmp_path: Path) -> None:
    heard: asyncio.Queue[tuple[str, events_pb2.Tombstone]] = asyncio.Queue()

    async def hear(name: str, data: bytes) -> None:
        heard.put_nowait((name, events_pb2.Tombstone.FromString(data)))

    async with (
        asyncio.timeout(30),
        nats_process(tmp_path) as server,
        open_bus(server.url, "listener") as listener,
        open_bus(server.url, "speaker") as speaker,
    ):
        await listener.wait_connected()
        await listener.subscribe("tombstone", "*", on_message=hear)
        await listener.flush()
        await speaker.wait_connected()
        tombstone = events_pb2.Tombstone(worker_uid="w-1", incarnation=7)
        await speaker.publish_tombstone(tombstone)
        assert await heard.get() == ("kvist.v1.test.tombstone.w-1", tombstone)


async def test_an_outage_loses_samples_but_no_tombstone(tmp_path: Path) -> None:
    heard: asyncio.Queue[int] = asyncio.Queue()

    async def hear(_name: str, data: bytes) -> None:
        heard.put_nowait(events_pb2.Tombstone.FromString(data).incarnation)

    registry = CollectorRegistry()
    server = NatsProcess(tmp_path)
    try:
        async with (
            asyncio.timeout(60),
            open_bus(server.url, "listener") as listener,
            open_bus(server.url, "speaker", registry) as speaker,
        ):
            # Said before any server was there.
            await listener.subscribe("tombstone", "*", on_message=hear)
            await speaker.publish_tombstone(events_pb2.Tombstone(worker_uid="w-1", incarnation=1))
            await speaker.publish_decision(events_pb2.DecisionRecord(request_id="r"))
            assert registry.get_sample_value("kvist_bus_dropped_messages_total", {"reason": "disconnected"}) == 2
            await server.start()
            await asyncio.gather(listener.wait_connected(), speaker.wait_connected())
            await server.stop()
            await until(lambda: not speaker.is_connected and not listener.is_connected)
            await speaker.publish_tombstone(events_pb2.Tombstone(worker_uid="w-1", incarnation=2))
            await server.start()
            while await heard.get() != 2:
                pass
    finally:
        await server.stop()


async def test_closing_never_waits_for_a_server(tmp_path: Path) -> None:
    async with asyncio.timeout(5):
        async with open_bus(NatsProcess(tmp_path).url, "alone") as bus:
            assert not bus.is_connected


@pytest.mark.parametrize("token", ["", "a.b", "*", ">", "a b", "é"])
def test_a_subject_takes_plain_tokens_only(token: str) -> None:
    with pytest.raises(ValueError, match="no token"):
        subject("test", token)
