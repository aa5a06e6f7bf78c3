"""`kvist nats config`: a real NATS server lets each role do what is its own, and nothing else."""

import asyncio
import base64
import contextlib
import json
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from kvist.bus import Bus
from kvist.cli.app import app
from kvist.events.v1 import events_pb2
from kvist.nats_accounts import NatsFolder, permissions
from kvist.settings import BusSettings
from support.nats_process import NatsProcess, nats_process

pytestmark = [pytest.mark.integration]

SECONDS = 30
CLUSTER = "home"


@contextlib.asynccontextmanager
async def speaker(nats: NatsProcess, folder: NatsFolder, role: str, *, cluster: str = CLUSTER) -> AsyncIterator[Bus]:
    settings = BusSettings(urls=(nats.url,), credentials_file=folder.credentials_file(role))
    async with Bus(settings, cluster=cluster, client_name=role, registry=CollectorRegistry()) as bus:
        async with asyncio.timeout(SECONDS):
            while not bus.is_connected:
                await asyncio.sleep(0.01)
        yield bus


def tombstone(uid: str) -> events_pb2.Tombstone:
    return events_pb2.Tombstone(worker_uid=uid, incarnation=1)


async def heard(bus: Bus) -> asyncio.Queue[str]:
    """Subjects of the tombstones that somebody hears."""
    queue: asyncio.Queue[str] = asyncio.Queue()

    async def note(name: str, _data: bytes) -> None:
        queue.put_nowait(name)

    await bus.subscribe("tombstone", "*", on_message=note)
    return queue


async def denied(log: Path, *words: str) -> None:
    """Waits until the server has refused it."""
    async with asyncio.timeout(SECONDS):
        while not any(all(word in line for word in words) for line in log.read_text().splitlines()):
            await asyncio.sleep(0.02)


@pytest.fixture
def folder(tmp_path: Path) -> NatsFolder:
    made = NatsFolder(tmp_path / "bus")
    made.write(cluster=CLUSTER)
    return made


async def test_agents_say_what_routers_hear(folder: NatsFolder, tmp_path: Path) -> None:
    log = tmp_path / "nats.log"
    async with (
        asyncio.timeout(SECONDS * 3),
        nats_process(tmp_path, configuration=folder.configuration_file.read_text()) as nats,
        speaker(nats, folder, "agent") as agent,
        speaker(nats, folder, "router") as router,
        speaker(nats, folder, "kvmaster") as kvmaster,
    ):
        queues = [await heard(router), await heard(kvmaster)]
        await agent.publish_tombstone(tombstone("w-1"))
        for queue in queues:
            assert await asyncio.wait_for(queue.get(), SECONDS) == f"kvist.v1.{CLUSTER}.tombstone.w-1"
        # Neither may declare a worker dead, and an agent hears nobody.
        for bus in (router, kvmaster):
            await bus.publish_tombstone(tombstone("w-2"))
        await denied(log, "Publish Violation", _public(folder, "router"))
        await denied(log, "Publish Violation", _public(folder, "kvmaster"))
        eavesdropper = await heard(agent)
        await denied(log, "Subscription Violation")
        await agent.publish_tombstone(tombstone("w-3"))
        for queue in queues:
            async with asyncio.timeout(SECONDS):
                while (name := await queue.get()) != f"kvist.v1.{CLUSTER}.tombstone.w-3":
                    # An agent's tombstones are repeated after each connection.
                    assert name.endswith(".w-1")
        assert eavesdropper.empty()


async def test_another_cluster_is_out_of_reach(folder: NatsFolder, tmp_path: Path) -> None:
    log = tmp_path / "nats.log"
    async with (
        asyncio.timeout(SECONDS * 3),
        nats_process(tmp_path, configuration=folder.configuration_file.read_text()) as nats,
        speaker(nats, folder, "agent", cluster="other") as agent,
        speaker(nats, folder, "router", cluster="other") as router,
    ):
        await agent.publish_tombstone(tombstone("w-1"))
        await denied(log, "Publish Violation")
        await heard(router)
        await denied(log, "Subscription Violation")


def _public(folder: NatsFolder, role: str) -> str:
    """The public key in a credentials file's token."""
    body = folder.credentials_file(role).read_text().splitlines()[1].split(".")[1]
    return str(json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))["sub"])


def test_files_are_for_their_owner_and_stay(tmp_path: Path) -> None:
    run = CliRunner().invoke
    path = tmp_path / "bus"
    assert run(app, ["nats", "config", str(path), "--cluster", CLUSTER]).exit_code == 0
    secret = {file.name: file.read_text() for file in path.iterdir() if file.name != "nats.conf"}
    assert set(secret) == {"operator.seed", "account.seed", *(f"{role}.creds" for role in permissions(CLUSTER))}
    assert {stat.S_IMODE((path / name).stat().st_mode) for name in secret} == {0o600}
    configuration = (path / "nats.conf").read_text()
    for name, text in secret.items():
        seed = next(line for line in text.splitlines() if line.startswith("S"))
        assert seed not in configuration, name
    assert run(app, ["nats", "config", str(path), "--cluster", CLUSTER]).exit_code == 0
    assert {file.name: file.read_text() for file in path.iterdir() if file.name != "nats.conf"} == secret
    assert run(app, ["nats", "config", str(path), "--cluster", CLUSTER, "--renew"]).exit_code == 0
    assert secret["agent.creds"] != (path / "agent.creds").read_text()
    assert secret["account.seed"] == (path / "account.seed").read_text()


def test_a_damaged_seed_and_a_wrong_name_are_refused(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert run(app, ["nats", "config", str(tmp_path), "--cluster", "a.b"]).exit_code == 2
    (tmp_path / "account.seed").write_text("nonsense\n")
    result = run(app, ["nats", "config", str(tmp_path)])
    assert result.exit_code == 2
    assert (tmp_path / "account.seed").read_text() == "nonsense\n"
