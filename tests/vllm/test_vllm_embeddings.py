"""A worker whose vLLM was started for embeddings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvist.engine.v1 import engine_pb2
from kvist.errors import KvistError, rpc_errors
from support.vllm_direct import answers_of_vllm
from support.vllm_worker import ANSWER_SECONDS, Worker, prompt_of, running_worker

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def pooling_arguments(engine_arguments: dict[str, Any]) -> dict[str, Any]:
    """The same model, whose last hidden state is the embedding."""
    unused = {"speculative-config", "structured-outputs-config"}
    return {**{name: value for name, value in engine_arguments.items() if name not in unused}, "runner": "pooling"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedder(
    tmp_path_factory: pytest.TempPathFactory, pooling_arguments: dict[str, Any]
) -> AsyncIterator[Worker]:
    async with running_worker(tmp_path_factory.mktemp("embedder"), pooling_arguments) as worker:
        yield worker


async def embed(worker: Worker, *inputs: list[int]) -> engine_pb2.EmbedResponse:
    request = engine_pb2.EmbedRequest(inputs=[engine_pb2.TokenIds(ids=ids) for ids in inputs])
    with rpc_errors():
        response: engine_pb2.EmbedResponse = await worker.stub.Embed(request, timeout=ANSWER_SECONDS)
    return response


async def test_it_says_that_it_embeds_and_generates_nothing(embedder: Worker) -> None:
    described = (await embedder.stub.Describe(engine_pb2.DescribeRequest())).worker
    able = described.capabilities
    assert (able.embeddings, able.kv_events, able.logprobs) == (True, False, False)
    with pytest.raises(KvistError, match="generates nothing"):
        await embedder.answer(1, 2, 3)


async def test_embeddings_are_those_of_vllm_called_directly(
    embedder: Worker, pooling_arguments: dict[str, Any], tmp_path: Path
) -> None:
    inputs = [prompt_of(seed, tokens) for seed, tokens in ((50, 1), (51, 40), (52, 300))]
    response = await embed(embedder, *inputs)
    assert [one.prompt_tokens for one in response.embeddings] == [1, 40, 300]
    directly = await answers_of_vllm(tmp_path, arguments=pooling_arguments, prompts=inputs)
    for ours, wanted in zip(response.embeddings, directly, strict=True):
        # What is computed in other batches is added up in another order.
        assert list(ours.values) == pytest.approx(wanted, abs=1e-4)
    # Asked alone, and once more, when its beginning is cached.
    again = await embed(embedder, inputs[1])
    assert list(again.embeddings[0].values) == pytest.approx(directly[1], abs=1e-4)


async def test_an_input_that_is_too_long_is_refused(embedder: Worker) -> None:
    with pytest.raises(KvistError) as refused:
        await embed(embedder, prompt_of(53, 20), prompt_of(54, 513))
    assert refused.value.code == "CONTEXT_LENGTH_EXCEEDED"
