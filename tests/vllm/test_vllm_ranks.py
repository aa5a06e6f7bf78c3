"""A worker whose engine has two data-parallel ranks, an adapter, and a queue ordered by priority."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from kvist.engine.v1 import engine_pb2
from kvist.errors import KvistError
from support.lora_folder import lora_folder
from support.vllm_worker import BLOCK_SIZE_TOKENS, KV_BLOCKS, Worker, block_hashes, prompt_of, running_worker

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranks(
    tmp_path_factory: pytest.TempPathFactory, engine_arguments: dict[str, Any], model_folder: Path
) -> AsyncIterator[Worker]:
    folder = tmp_path_factory.mktemp("ranks")
    arguments = {
        **engine_arguments,
        "data-parallel-size": 2,
        "enable-lora": True,
        "max-lora-rank": 8,
        "lora-modules": {"random": str(lora_folder(folder / "random", model_folder))},
        "scheduling-policy": "priority",
    }
    async with running_worker(folder, arguments) as worker:
        yield worker


async def test_each_rank_has_a_cache_and_a_ledger_of_its_own(ranks: Worker) -> None:
    described = (await ranks.stub.Describe(engine_pb2.DescribeRequest())).worker
    assert (described.ranks, described.limits.kv_blocks) == (2, KV_BLOCKS)
    for rank in (1, 0):
        prompt = prompt_of(30 + rank, 2 * BLOCK_SIZE_TOKENS + 1)
        assert (await ranks.answer(*prompt, max_tokens=1, rank=rank)).cached_tokens == 0
        await ranks.holds(prompt, rank)
        assert not set(block_hashes(prompt)) & await ranks.held_blocks(1 - rank)
        assert (await ranks.answer(*prompt, max_tokens=1, rank=rank)).cached_tokens == 2 * BLOCK_SIZE_TOKENS
        assert (await ranks.answer(*prompt, max_tokens=1, rank=1 - rank)).cached_tokens == 0


async def test_a_reset_empties_all_ranks(ranks: Worker) -> None:
    prompt = prompt_of(33, BLOCK_SIZE_TOKENS + 1)
    for rank in (0, 1):
        await ranks.answer(*prompt, max_tokens=1, rank=rank)
        await ranks.holds(prompt, rank)
    await ranks.stub.ResetCache(engine_pb2.ResetCacheRequest(), timeout=30)
    for rank in (0, 1):
        assert not await ranks.held_blocks(rank)
        assert (await ranks.answer(*prompt, max_tokens=1, rank=rank)).cached_tokens == 0
        assert await ranks.holds(prompt, rank) == set(block_hashes(prompt))


async def test_an_adapter_has_a_namespace_of_its_own(ranks: Worker) -> None:
    prompt = prompt_of(34, 2 * BLOCK_SIZE_TOKENS + 1)
    base = await ranks.answer(*prompt, max_tokens=6)
    adapted = await ranks.answer(*prompt, max_tokens=6, adapter="random")
    assert adapted.cached_tokens == 0
    assert adapted.text_tokens != base.text_tokens
    await ranks.holds(prompt, adapter="random")
    await ranks.holds(prompt)
    again = await ranks.answer(*prompt, max_tokens=6, adapter="random")
    assert (again.cached_tokens, again.text_tokens) == (2 * BLOCK_SIZE_TOKENS, adapted.text_tokens)


async def test_a_priority_is_taken(ranks: Worker) -> None:
    answer = await ranks.answer(*prompt_of(35, 8), max_tokens=2, priority=-3)
    assert len(answer.text_tokens) == 2


async def test_an_adapter_comes_and_goes_while_the_worker_runs(
    ranks: Worker, tmp_path: Path, model_folder: Path
) -> None:
    folder = lora_folder(tmp_path / "late", model_folder)
    await ranks.stub.LoadAdapter(engine_pb2.LoadAdapterRequest(name="late", path=str(folder)), timeout=60)
    prompt = prompt_of(36, BLOCK_SIZE_TOKENS + 1)
    first = await ranks.answer(*prompt, max_tokens=4, adapter="late")
    # The same weights as those of the other adapter, and a namespace of its own all the same.
    assert first.text_tokens == (await ranks.answer(*prompt, max_tokens=4, adapter="random")).text_tokens
    await ranks.holds(prompt, adapter="late")
    await ranks.stub.UnloadAdapter(engine_pb2.UnloadAdapterRequest(name="late"), timeout=60)
    with pytest.raises(KvistError) as refused:
        await ranks.answer(*prompt, adapter="late")
    assert refused.value.code == "UNKNOWN_MODEL"
    with pytest.raises(grpc.aio.AioRpcError) as wrong:
        await ranks.stub.LoadAdapter(engine_pb2.LoadAdapterRequest(name="late", path=str(tmp_path)), timeout=60)
    assert wrong.value.code() == grpc.StatusCode.ALREADY_EXISTS
