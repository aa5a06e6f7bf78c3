"""What agents and KV masters show of the event plane on `/metrics`."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from kvist import _core, names
from kvist.agent.v1.agent_pb2 import WORKER_PHASE_READY, WorkerSpec, WorkerStatus
from kvist.changes import Changes
from kvist.settings import BusSettings
from kvist_agent.attached import AttachedEngines
from kvist_agent.event_plane import EventPlane
from support.nats_process import nats_process
from support.scrape import scrape

pytestmark = pytest.mark.integration
LIMIT_SECONDS = 60


async def test_an_agent_shows_its_relay_while_it_runs(tmp_path: Path) -> None:
    runtime, registry = _core.Runtime(2), CollectorRegistry(auto_describe=True)
    worker = _core.WorkerServer(runtime, json.dumps({"worker_uid": "w-1", "digest_interval_ms": 50}))
    address = json.loads(await asyncio.to_thread(worker.start))["grpc_address"]
    status = WorkerStatus(spec=WorkerSpec(worker_uid="w-1"), phase=WORKER_PHASE_READY, address=address)
    slot = SimpleNamespace(local_address=address)
    slots = SimpleNamespace(changes=Changes(), statuses=lambda: [status], slot=lambda _uid: slot)
    async with asyncio.timeout(LIMIT_SECONDS), nats_process(tmp_path) as nats:
        events = EventPlane(BusSettings(urls=(nats.url,)), node_uid="n-1", registry=registry)
        events.enter_cluster("test")
        none = AttachedEngines((), folder=tmp_path, node_uid="n-1", registry=registry)
        relaying = asyncio.create_task(events.run(slots, none))
        # A ledger states its digest also when it is idle.
        while not registry.get_sample_value(names.RELAY_MESSAGES, {"worker": "w-1"}):
            assert not relaying.done()
            await asyncio.sleep(0.02)
        assert registry.get_sample_value(names.RELAY_CONNECTED, {"worker": "w-1"}) == 1
        relaying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await relaying
    assert registry.get_sample_value(names.RELAY_BUS_CONNECTED) is None
    await asyncio.to_thread(worker.stop)
    runtime.close()


async def test_a_kv_master_shows_its_index(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    async with asyncio.timeout(LIMIT_SECONDS), nats_process(tmp_path) as nats:
        # No controller listens there: an index without a cluster state is empty and still has its numbers.
        settings = ("--set", f'bus.urls=["{nats.url}"]', "--set", 'controllers=["127.0.0.1:1"]')
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvist_kvmaster", *settings, "--ready-file", str(ready)),
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            while not ready.exists():
                assert process.returncode is None
                await asyncio.sleep(0.02)
            address = json.loads(ready.read_text())["admin_address"]
            while not (shown := await scrape(address))[names.BUS_CONNECTED]:
                await asyncio.sleep(0.02)
        finally:
            process.terminate()
            await process.wait()
    assert (0, 0) == (shown[names.INDEX_BATCHES], shown[f"{names.INDEX_SKIPPED_BATCHES} duplicate"])
    assert shown[f"{names.INDEX_SOURCES} exact"] == 0
    assert shown[names.INDEX_BYTE_BUDGET] == 2**30
