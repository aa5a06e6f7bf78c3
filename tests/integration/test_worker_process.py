"""The life of a worker process, with the simulated engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvist.engine.v1 import engine_pb2, engine_pb2_grpc
from kvist.errors import KvistError, rpc_errors
from kvist.grpc import open_channel

pytestmark = pytest.mark.integration
SECONDS = 30
WORKER_STOP_SECONDS = 1.9


@contextlib.asynccontextmanager
async def worker(folder: Path, **settings: Any) -> AsyncIterator[tuple[asyncio.subprocess.Process, Path]]:
    path, ready = folder / "settings.json", folder / "ready.json"
    path.write_text(json.dumps({"worker_uid": "w-1", "model": "m", "engine": "sim", **settings}))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvist_worker", "--settings-file", path, "--ready-file", ready),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process, ready
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def announced(process: asyncio.subprocess.Process, ready: Path) -> dict[str, Any]:
    async with asyncio.timeout(SECONDS):
        while not ready.exists():
            assert process.returncode is None
            await asyncio.sleep(0.02)
    return dict(json.loads(ready.read_text()))


async def test_a_worker_announces_itself_serves_drains_and_ends(tmp_path: Path) -> None:
    slow = {"decodeStepMs": 20}
    floor = 2**60
    async with worker(tmp_path, engine_arguments=slow, incarnation_floor=floor) as (process, ready):
        addresses = await announced(process, ready)
        assert (addresses["event"], addresses["process_id"]) == ("listening", process.pid)
        assert addresses["incarnation"] > floor
        assert addresses["admin_address"].startswith("127.0.0.1:")
        async with open_channel(addresses["grpc_address"], retries=False) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            request = engine_pb2.EngineRequest(
                tokens=engine_pb2.TokenIds(ids=[1, 2, 3]), stop=engine_pb2.StopConditions(max_tokens=20)
            )
            tokens, finished = 0, None
            with rpc_errors():
                async for response in stub.Generate(engine_pb2.GenerateRequest(request=request), timeout=SECONDS):
                    if not tokens:
                        process.send_signal(signal.SIGTERM)
                    tokens += len(response.delta.token_ids)
                    if response.WhichOneof("event") == "finished":
                        finished = response.finished
        # It was asked to stop while it answered, and finished the answer.
        assert finished is not None
        assert (tokens, finished.reason) == (20, engine_pb2.FINISH_REASON_LENGTH)
        async with asyncio.timeout(SECONDS):
            assert await process.wait() == 0


async def test_an_idle_worker_ends_at_once_whoever_follows_it(tmp_path: Path) -> None:
    async with worker(tmp_path) as (process, ready), asyncio.timeout(SECONDS):
        addresses = await announced(process, ready)
        async with open_channel(addresses["grpc_address"], retries=False) as channel:
            call = engine_pb2_grpc.EngineServiceStub(channel).WatchKvEvents(
                engine_pb2.WatchKvEventsRequest(follow=True)
            )
            await call.read()
            process.send_signal(signal.SIGTERM)
            asked_at = time.monotonic()
            with pytest.raises(KvistError) as caught, rpc_errors():
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert caught.value.code == "DRAINING"
            assert await process.wait() == 0
        # Below the limit for clients that do not read, with room for the end of the interpreter on a busy machine.
        assert time.monotonic() - asked_at < WORKER_STOP_SECONDS


async def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    async with worker(tmp_path, engine="vllm") as (process, ready), asyncio.timeout(SECONDS):
        _, log = await process.communicate()
        assert process.returncode == 1
        assert not ready.exists()
        line = json.loads(log.decode().splitlines()[-1])
        assert (line["event"], line["code"]) == ("worker_failed", "NOT_IMPLEMENTED")


async def test_wrong_arguments_of_the_simulated_engine_are_named(tmp_path: Path) -> None:
    async with worker(tmp_path, engine_arguments={"blockz": 1}) as (process, _), asyncio.timeout(SECONDS):
        _, log = await process.communicate()
        assert process.returncode == 1
        assert "blockz" in log.decode()


async def test_a_signal_during_the_drain_ends_the_worker_at_once(tmp_path: Path) -> None:
    slow = {"decodeStepMs": 1000}
    async with worker(tmp_path, engine_arguments=slow, drain_time_limit_ms=600_000) as (process, ready):
        addresses = await announced(process, ready)
        async with open_channel(addresses["grpc_address"], retries=False) as channel, asyncio.timeout(SECONDS):
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            request = engine_pb2.EngineRequest(tokens=engine_pb2.TokenIds(ids=[1, 2, 3]))
            stream = stub.Generate(engine_pb2.GenerateRequest(request=request))
            assert await stream.read() is not None
            process.send_signal(signal.SIGTERM)
            while not (await stub.Describe(engine_pb2.DescribeRequest())).worker.draining:
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 128 + signal.SIGTERM
            stream.cancel()


async def test_rdma_without_a_device_is_said_before_a_socket_is_opened(tmp_path: Path) -> None:
    """TCP is never taken in its place: the worker ends, whatever its engine, and says which device is missing."""
    hand_over = {"connector": "NixlConnector", "protocol": "rdma", "rdma_device": "mlx5_7"}
    for engine in ("sim", "vllm"):
        async with worker(tmp_path, engine=engine, role="prefill", hand_over=hand_over) as (process, ready):
            async with asyncio.timeout(SECONDS):
                _, said = await process.communicate()
            assert process.returncode != 0
            assert "needs mlx5_7" in said.decode()
            assert not ready.exists()
