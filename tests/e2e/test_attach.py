"""An engine that Kvist did not start: what it publishes is known to router and KV master, and they say how well."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.embedded import EmbeddedCluster
from support.fake_vllm import FakeVllm, recorded
from support.scrape import scrape

LIMIT_SECONDS = 100.0


@pytest.fixture(scope="module")
def cluster(start: Callable[..., EmbeddedCluster]) -> EmbeddedCluster:
    return start("--engine=sim", "--workers=1")


@dataclass(slots=True)
class Agent:
    """An agent process beside that of the cluster, which starts no workers and has attached one engine."""

    cluster: EmbeddedCluster
    engine: FakeVllm
    folder: Path
    process: asyncio.subprocess.Process | None = None
    addresses: dict[str, Any] = field(default_factory=dict)

    async def start(self) -> None:
        config, ready = self.folder / "agent.yaml", self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        settings = {
            "node_name": "attaching",
            "state_folder": str(self.folder / "state"),
            "controllers": [self.cluster.address("controller")],
            "bus": {"urls": [f"nats://{self.cluster.address('nats')}"]},
            # It is no node for workers.
            "workers": {"engines": ["vllm"]},
            "attach": [
                {
                    "name": "stock",
                    "model": "smollm2",
                    "events_endpoint": self.engine.events_endpoint,
                    "replay_endpoint": self.engine.replay_endpoint,
                    "block_size_tokens": 32,
                    "idle_interval_seconds": 0.2,
                }
            ],
        }
        config.write_text(yaml.safe_dump(settings))
        with (self.folder / "agent.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvist_agent", "--config", str(config), "--ready-file", str(ready)), stderr=log
            )
        while not ready.exists():
            assert self.process.returncode is None, (self.folder / "agent.log").read_text()
            await asyncio.sleep(0.02)
        self.addresses = json.loads(ready.read_text())

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    @property
    def uid(self) -> str:
        return f"attached-{self.addresses['node_uid'].removeprefix('node-')}-stock"

    async def number(self, name: str, *labels: str) -> float:
        """A number of the rank on the agent's `/metrics`, which sort labels: rank, reason or socket, worker."""
        return (await scrape(self.addresses["admin_address"]))[" ".join((name, "0", *labels, self.uid))]

    async def source(self) -> dict[str, Any]:
        """What `kvist kv status` says of the engine; empty before it knows it."""
        done = await asyncio.to_thread(self.cluster.run, "kv", "status", "--json")
        rows = json.loads(done.stdout)["sources"] if done.stdout else []
        return next((row for row in rows if row["worker_uid"] == self.uid), {})

    async def becomes(self, state: str, *, blocks: int | None = None, after: int = 0) -> dict[str, Any]:
        """Waits until ledger, router and KV master hold the same of an incarnation, and are of a state."""
        row: dict[str, Any] = {}
        try:
            async with asyncio.timeout(LIMIT_SECONDS / 3):
                while True:
                    row = await self.source()
                    if (
                        row.get("verdict") == "EQUAL"
                        and state == row["router"]["state"] == row["kvmaster"]["state"]
                        and blocks in {None, row["ledger"]["blocks"]}
                        and int(row["ledger"]["incarnation"]) > after
                    ):
                        return row
        except TimeoutError:
            raise AssertionError(f"{row}\n{(self.folder / 'agent.log').read_text()}") from None


@contextlib.asynccontextmanager
async def attached(cluster: EmbeddedCluster, folder: Path) -> AsyncIterator[Agent]:
    engine = FakeVllm()
    async with engine.running():
        agent = Agent(cluster, engine, folder)
        await agent.start()
        try:
            yield agent
        finally:
            await agent.kill()


async def test_an_attached_engine_is_known_to_the_block_whatever_its_sockets_lose(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    payloads = recorded()
    async with asyncio.timeout(LIMIT_SECONDS), attached(cluster, tmp_path) as agent:
        engine = agent.engine
        await engine.publish(payloads[0])
        first = await agent.becomes("EXACT", blocks=3)
        assert first["ledger"]["digest"] == first["router"]["digest"] == first["kvmaster"]["digest"] != ""

        # A batch that is lost is seen by the number of the next; one that is the last, by asking.
        await engine.publish(payloads[1], is_lost=True)
        await engine.publish(payloads[2])
        await agent.becomes("EXACT", blocks=4)
        for payload in payloads[3:]:
            await engine.publish(payload, is_lost=True)
        while await agent.number("kvist_attached_batches_total", "replayed") < len(payloads) - 2:
            await asyncio.sleep(0.05)
        await agent.becomes("EXACT")
        assert 1 <= await agent.number("kvist_attached_gaps_total")
        assert 0 == await agent.number("kvist_attached_losses_total")
        assert "EQUAL" in await asyncio.to_thread(cluster.kvist, "kv", "audit")

        # Another start of the engine: nothing of the old one is left.
        engine.restart()
        await engine.publish(payloads[0])
        second = await agent.becomes("EXACT", blocks=3, after=int(first["ledger"]["incarnation"]))
        assert 1 == await agent.number("kvist_attached_restarts_total")

        # Nobody remembers what is missing: what is claimed is true, and something may be missing.
        engine.most_remembered = 1
        await engine.publish(payloads[1], is_lost=True)
        await engine.publish(payloads[2], is_lost=True)
        await engine.publish(payloads[0])
        await agent.becomes("PARTIAL")
        assert 1 == await agent.number("kvist_attached_losses_total")
        assert "PARTIAL" in await asyncio.to_thread(cluster.kvist, "kv", "status")

        # The agent is killed: its successor reads from the beginning, under a larger incarnation.
        await agent.kill()
        engine.restart()
        engine.most_remembered = 10_000
        for payload in payloads:
            await engine.publish(payload)
        await agent.start()
        await agent.becomes("EXACT", after=int(second["ledger"]["incarnation"]))
