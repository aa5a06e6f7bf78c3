"""Everybody who uses the bus gets through a door that is locked, and says at the start when the key is wrong."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvist import _core
from kvist.bus import Bus
from kvist.controller.v1 import controller_pb2
from kvist.errors import InvalidRequestError
from kvist.settings import BusSettings, load
from kvist_agent.event_plane import EventPlane, relay_settings
from kvist_kvmaster import app as kvmaster_app
from kvist_kvmaster.settings import KvMasterSettings
from kvist_router import app as router_app
from kvist_router.settings import RouterSettings
from support.nats_process import nats_process
from support.nats_security import Door, credentials_door, password_door, tls_door

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="keys and certificates are made by the openssl command"),
]
SECONDS = 30
DOORS: dict[str, Callable[[Path], Door]] = {
    "password": lambda _: password_door(),
    "credentials": credentials_door,
    "tls": tls_door,
}


@pytest.fixture
def runtime() -> AsyncIterator[_core.Runtime]:
    opened = _core.Runtime(2)
    yield opened
    opened.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.02)


def bus_settings(door: Door, port: int) -> BusSettings:
    return BusSettings(
        urls=(f"nats://{door.login}127.0.0.1:{port}",),
        credentials_file=door.credentials_file,
        tls_ca_file=door.ca_file,
    )


def router_of(runtime: _core.Runtime, bus: BusSettings) -> _core.RouterServer:
    settings = load(RouterSettings, environment={}, flags={"controllers": "127.0.0.1:9", "bus": bus.model_dump()})
    return _core.RouterServer(runtime, json.dumps(router_app.core_settings(settings.settings)))


def index_of(runtime: _core.Runtime, bus: BusSettings) -> _core.IndexService:
    settings = load(KvMasterSettings, environment={}, flags={"cluster": "test", "bus": bus.model_dump()})
    return _core.IndexService(runtime, json.dumps(kvmaster_app.core_settings(settings.settings)))


def relay_of(runtime: _core.Runtime, bus: BusSettings) -> _core.Relay:
    return _core.Relay(runtime, json.dumps(relay_settings(bus, cluster="test", client_name="relay")))


@contextlib.asynccontextmanager
async def everybody(runtime: _core.Runtime, bus: BusSettings) -> AsyncIterator[dict[str, Callable[[], bool]]]:
    """All who use the bus, and whether each is connected."""
    router, index, relay = router_of(runtime, bus), index_of(runtime, bus), relay_of(runtime, bus)
    await asyncio.to_thread(router.start)
    state = controller_pb2.ClusterState(
        version=controller_pb2.ClusterVersion(store_epoch=1, revision=1), cluster="test"
    )
    # The feed begins with the first cluster state.
    router.apply_cluster_state(state.SerializeToString())
    await asyncio.to_thread(index.start)
    await asyncio.to_thread(relay.start)
    try:
        async with Bus(bus, cluster="test", client_name="python", registry=CollectorRegistry()) as python:
            yield {
                "router": lambda: json.loads(router.status())["bus_connected"],
                "index": lambda: json.loads(index.feed_stats())["bus_connected"],
                "relay": lambda: json.loads(relay.stats())["bus_connected"],
                "python": lambda: python.is_connected,
            }
    finally:
        relay.stop()
        index.stop()
        await asyncio.to_thread(router.stop)


@pytest.mark.parametrize("kind", DOORS)
async def test_everybody_gets_through_a_locked_door(runtime: _core.Runtime, tmp_path: Path, kind: str) -> None:
    door = DOORS[kind](tmp_path)
    async with (
        nats_process(tmp_path, configuration=door.configuration) as nats,
        everybody(runtime, bus_settings(door, nats.port)) as connected,
    ):
        await until(lambda: all(is_connected() for is_connected in connected.values()))


async def test_a_stranger_stays_outside(runtime: _core.Runtime, tmp_path: Path) -> None:
    door = credentials_door(tmp_path)
    log = tmp_path / "nats.log"
    async with (
        nats_process(tmp_path, configuration=door.configuration) as nats,
        everybody(runtime, bus_settings(Door(configuration=""), nats.port)) as connected,
    ):
        # Each of the four has tried at least once.
        await until(lambda: log.read_text().count("authentication error") >= 2 * len(connected))
        assert not any(is_connected() for is_connected in connected.values())


async def test_a_server_without_tls_is_not_spoken_to_when_authorities_are_named(
    runtime: _core.Runtime, tmp_path: Path
) -> None:
    ca_file = tls_door(tmp_path).ca_file
    log = tmp_path / "nats.log"
    async with (
        nats_process(tmp_path, configuration="debug: true\n") as nats,
        everybody(runtime, bus_settings(Door(configuration="", ca_file=ca_file), nats.port)) as connected,
    ):
        await until(lambda: log.read_text().count("Client connection created") >= 2 * len(connected))
        assert not any(is_connected() for is_connected in connected.values())


@pytest.mark.parametrize("field", ["credentials_file", "tls_ca_file"])
@pytest.mark.parametrize(("content", "reason"), [(None, "cannot be read: No such file"), ("nonsense", "holds no")])
def test_a_wrong_file_is_said_at_the_start(
    runtime: _core.Runtime, tmp_path: Path, field: str, content: str | None, reason: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    bus = BusSettings(urls=("nats://127.0.0.1:9",), **{field: path})
    for start in (router_of(runtime, bus).start, index_of(runtime, bus).start, relay_of(runtime, bus).start):
        with pytest.raises(_core.CoreError, match=f"{field}:? {reason}"):
            start()
    with pytest.raises(InvalidRequestError, match=f"{field}: {reason}"):
        EventPlane(bus, node_uid="n", registry=CollectorRegistry())
