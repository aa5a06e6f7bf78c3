"""How tests speak with a worker that hosts vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvist import _core
from kvist.engine.v1 import engine_pb2, engine_pb2_grpc
from kvist.errors import rpc_errors
from kvist.grpc import open_channel

MODEL = "smollm2"
HASH_SEED = 7
BLOCK_SIZE_TOKENS = 32
KV_BLOCKS = 28
# A small machine: one thread for each process, nothing compiled, nothing fetched.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
# Where one engine may need the whole of two cores for minutes.
START_SECONDS = 600
# For a whole answer of some tokens on a machine that is busy with other things.
ANSWER_SECONDS = 240


class Answer:
    """What came of one request."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: list[engine_pb2.TokenLogprobs] = []
        self.cached_tokens: int | None = None
        self.finished = engine_pb2.Finished()

    @property
    def text_tokens(self) -> list[int]:
        """Of the first choice."""
        return self.tokens.get(0, [])


class Worker:
    """A running worker."""

    def __init__(self, process: asyncio.subprocess.Process | None, ready: dict[str, Any], channel: Any) -> None:
        self.process = process
        self.ready = ready
        self.stub = engine_pb2_grpc.EngineServiceStub(channel)

    async def answer(self, *prompt: int, max_tokens: int = 4, **fields: Any) -> Answer:
        """One request, to its end; greedy unless told otherwise."""
        fields.setdefault("sampling", engine_pb2.SamplingParameters(temperature=0))
        fields.setdefault("stop", engine_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True))
        request = engine_pb2.EngineRequest(tokens=engine_pb2.TokenIds(ids=prompt), **fields)
        answer = Answer()
        with rpc_errors():
            call = self.stub.Generate(engine_pb2.GenerateRequest(request=request), timeout=ANSWER_SECONDS)
            async for response in call:
                if response.WhichOneof("event") == "finished":
                    answer.finished = response.finished
                    return answer
                delta = response.delta
                answer.tokens.setdefault(delta.index, []).extend(delta.token_ids)
                answer.logprobs += delta.logprobs
                if delta.HasField("cached_tokens"):
                    assert answer.cached_tokens is None
                    answer.cached_tokens = delta.cached_tokens
        raise AssertionError("the stream had no end")

    async def held_blocks(self, rank: int = 0) -> set[int]:
        """What the ledger of a rank claims now."""
        held: set[int] = set()
        async for response in self.stub.WatchKvEvents(engine_pb2.WatchKvEventsRequest(ranks=[rank]), timeout=10):
            for blocks in response.snapshot.blocks:
                held.update(blocks.block_hashes)
            for event in response.batch.events:
                match event.WhichOneof("event"):
                    case "stored":
                        held.update(event.stored.block_hashes)
                    case "removed":
                        held.difference_update(event.removed.block_hashes)
                    case "cleared":
                        held.clear()
        return held

    async def holds(self, prompt: list[int], rank: int = 0, **namespace: str) -> set[int]:
        """Waits until the ledger claims a prompt's blocks; returns all that it claims then."""
        wanted = set(block_hashes(prompt, **namespace))
        async with asyncio.timeout(10):
            while not wanted <= (held := await self.held_blocks(rank)):
                await asyncio.sleep(0.02)
        return held

    async def claimed_tokens(self, prompt: list[int], **namespace: str) -> int:
        """Tokens of a prompt that the ledger claims, up to the last one, which is always computed."""
        held = await self.held_blocks()
        blocks = 0
        for block in block_hashes(prompt, **namespace):
            if block not in held:
                break
            blocks += 1
        return min(blocks, (len(prompt) - 1) // BLOCK_SIZE_TOKENS) * BLOCK_SIZE_TOKENS


def prompt_of(seed: int, tokens: int) -> list[int]:
    """Token ids of a prompt that nobody else asks for."""
    return random.Random(seed).choices(range(1_000, 40_000), k=tokens)


def block_hashes(prompt: list[int], *, adapter: str = "", cache_salt: str = "") -> list[int]:
    """As the mesh names a prompt's blocks."""
    return _core.block_hashes(HASH_SEED, MODEL, adapter, cache_salt, prompt, BLOCK_SIZE_TOKENS)


@contextlib.asynccontextmanager
async def running_worker(folder: Path, engine_arguments: dict[str, Any]) -> AsyncIterator[Worker]:
    """A worker with an engine of its own, which is ended with all its processes."""
    settings, ready, log = folder / "settings.json", folder / "ready.json", folder / "log"
    settings.write_text(
        json.dumps(
            {
                "worker_uid": "w-1",
                "model": MODEL,
                "hash_seed": HASH_SEED,
                "engine": "vllm",
                "engine_arguments": engine_arguments,
            }
        )
    )
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvist_worker", "--settings-file", settings, "--ready-file", ready),
            env={**os.environ, **ENVIRONMENT},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(START_SECONDS):
            while not ready.exists():
                assert process.returncode is None, log.read_text()[-4000:]
                await asyncio.sleep(0.1)
        announced = json.loads(ready.read_text())
        async with open_channel(announced["grpc_address"], retries=False) as channel:
            yield Worker(process, announced, channel)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
