"""A worker with vLLM and a real model. One engine serves all tests: its start takes minutes on a small machine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvist import engines
from kvist.engine.v1 import engine_pb2
from kvist.grpc import open_channel
from support.model_folder import smollm2_folder
from support.vllm_worker import BLOCK_SIZE_TOKENS, KV_BLOCKS, Worker, running_worker


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm-worker", type=Path, help="ready file of a worker that runs already, for quick turns")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if engines.find("vllm") is None:
        for item in items:
            if "tests/vllm" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: kvist engine install vllm --cpu"))


@pytest.fixture(scope="session")
def model_folder(pytestconfig: pytest.Config) -> Path:
    """The packaged model, as vLLM loads models."""
    return smollm2_folder(pytestconfig.rootpath / "target" / "models" / "smollm2")


@pytest.fixture(scope="session")
def engine_arguments(model_folder: Path) -> dict[str, Any]:
    """Few blocks, so that evictions are easily forced."""
    return {
        "model": str(model_folder),
        "dtype": "float32",
        "enforce-eager": True,
        "max-model-len": 512,
        "max-num-seqs": 8,
        "max_num_batched_tokens": 512,
        "block-size": BLOCK_SIZE_TOKENS,
        "num-gpu-blocks-override": KV_BLOCKS,
        # As it comes out of a protobuf `Struct`.
        "kv-cache-memory-bytes": float(64 << 20),
        "speculative-config": None,
        # So small a model would fill a document with line breaks.
        "structured-outputs-config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def worker(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, engine_arguments: dict[str, Any]
) -> AsyncIterator[Worker]:
    """The worker; it is ended with all its processes."""
    running: Path | None = pytestconfig.getoption("--vllm-worker")
    if running is not None:
        announced = json.loads(running.read_text())
        async with open_channel(announced["grpc_address"], retries=False) as channel:
            another = Worker(None, announced, channel)
            # Of an earlier turn something may be cached.
            await another.stub.ResetCache(engine_pb2.ResetCacheRequest())
            yield another
        return
    async with running_worker(tmp_path_factory.mktemp("worker"), engine_arguments) as started:
        yield started
