"""A worker with vLLM: its answers are vLLM's, and what its ledger claims is what vLLM finds."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import struct_pb2

from kvist import _core
from kvist.engine.v1 import engine_pb2
from kvist.errors import KvistError
from support.vllm_direct import answers_of_vllm
from support.vllm_worker import BLOCK_SIZE_TOKENS, KV_BLOCKS, Worker, block_hashes, prompt_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

GREEDY = engine_pb2.SamplingParameters(temperature=0)
ABORTED, LENGTH, STOP = (
    engine_pb2.FINISH_REASON_ABORTED,
    engine_pb2.FINISH_REASON_LENGTH,
    engine_pb2.FINISH_REASON_STOP,
)


@pytest.fixture(scope="session")
def text(model_folder: Path) -> _core.ModelText:
    return _core.ModelText((model_folder / "tokenizer.json").read_bytes())


async def test_a_worker_says_what_its_engine_is(worker: Worker) -> None:
    described = (await worker.stub.Describe(engine_pb2.DescribeRequest())).worker
    assert (described.engine, described.model, described.ranks) == ("vllm", "smollm2", 1)
    assert described.engine_version.startswith("0.32.")
    assert described.block_size_tokens == BLOCK_SIZE_TOKENS
    assert described.engine_hash_algorithm == "sha256_cbor"
    limits = described.limits
    assert (limits.context_tokens, limits.max_running_requests, limits.kv_blocks) == (512, 8, KV_BLOCKS)
    able = described.capabilities
    assert all((able.logprobs, able.json_schema, able.grammar, able.regex, able.kv_events))
    assert not any((able.adapters, able.kv_transfer))


async def test_the_tokenizer_is_the_models(worker: Worker, model_folder: Path) -> None:
    parts = [part async for part in worker.stub.GetTokenizer(engine_pb2.GetTokenizerRequest())]
    header, data = parts[0].header, b"".join(part.data for part in parts[1:])
    assert data == (model_folder / "tokenizer.json").read_bytes()
    assert "<|im_start|>" in header.chat_template
    assert all((header.eos_token, header.eos_token_ids))


async def test_all_sockets_of_the_engine_are_on_loopback(worker: Worker) -> None:
    front = psutil.Process(worker.ready["process_id"])
    listening = [
        connection.laddr.ip
        for process in (front, *front.children(recursive=True))
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    # Two of the worker, two of the engine's events.
    assert len(listening) >= 4
    assert {"127.0.0.1"} == set(listening)


async def test_a_prompt_asked_again_is_cached_as_the_ledger_claims(worker: Worker) -> None:
    prompt = prompt_of(1, 3 * BLOCK_SIZE_TOKENS + 5)
    first = await worker.answer(*prompt)
    assert (first.cached_tokens, first.finished.reason, len(first.text_tokens)) == (0, LENGTH, 4)
    await worker.holds(prompt)
    assert await worker.claimed_tokens(prompt) == 3 * BLOCK_SIZE_TOKENS
    second = await worker.answer(*prompt)
    assert second.cached_tokens == 3 * BLOCK_SIZE_TOKENS
    assert second.text_tokens == first.text_tokens
    receipt = second.finished.receipt
    assert (receipt.prompt_tokens, receipt.cached_tokens, receipt.completion_tokens) == (len(prompt), 96, 4)
    assert receipt.prefill_duration.ToNanoseconds() > 0
    assert receipt.decode_duration.ToNanoseconds() > 0
    assert receipt.HasField("queue_duration")


async def test_greedy_output_equals_vllm_called_directly(
    worker: Worker, text: _core.ModelText, engine_arguments: dict[str, Any], tmp_path: Path
) -> None:
    prompts = [text.encode("The capital of France is"), prompt_of(21, 50)]
    directly = await answers_of_vllm(tmp_path, arguments=engine_arguments, prompts=prompts, max_tokens=12)
    ours = [(await worker.answer(*prompt, max_tokens=12)).text_tokens for prompt in prompts]
    assert ours == directly
    assert "Paris" in text.decode(ours[0])


async def test_salts_separate_caches(worker: Worker) -> None:
    prompt = prompt_of(2, 2 * BLOCK_SIZE_TOKENS + 1)
    await worker.answer(*prompt, max_tokens=1)
    salted = await worker.answer(*prompt, max_tokens=1, cache_salt="ours")
    assert salted.cached_tokens == 0
    await worker.holds(prompt, cache_salt="ours")
    again = await worker.answer(*prompt, max_tokens=1, cache_salt="ours")
    assert again.cached_tokens == 2 * BLOCK_SIZE_TOKENS


async def test_the_ledger_is_exact_while_blocks_are_evicted(worker: Worker) -> None:
    """R1, R2: four prompts of a third of the cache each, again and again: each claim is what the engine then finds."""
    prompts = [prompt_of(10 + number, 9 * BLOCK_SIZE_TOKENS + number) for number in range(4)]
    order = random.Random(5)
    found = []
    for _ in range(8):
        prompt = order.choice(prompts)
        claimed = await worker.claimed_tokens(prompt)
        answer = await worker.answer(*prompt, max_tokens=1)
        assert answer.cached_tokens == claimed
        found.append(claimed)
        # The engine publishes a step's evictions before its stores.
        held = await worker.holds(prompt)
        assert len(held) < KV_BLOCKS
    assert any(found), "nothing was found again"
    assert not set().union(*(block_hashes(prompt) for prompt in prompts)) <= held, "nothing was evicted"


async def test_a_reset_is_seen_within_a_second_though_the_engine_is_idle(worker: Worker) -> None:
    prompt = prompt_of(3, 2 * BLOCK_SIZE_TOKENS + 1)
    await worker.answer(*prompt, max_tokens=1)
    held = await worker.holds(prompt)
    async with asyncio.timeout(10):
        removed = (await worker.stub.ResetCache(engine_pb2.ResetCacheRequest())).removed_blocks
    assert removed == len(held)
    async with asyncio.timeout(1):
        while await worker.held_blocks():
            await asyncio.sleep(0.01)
    # The engine says late that it has obeyed; then the account goes on.
    for cached in (0, 2 * BLOCK_SIZE_TOKENS):
        answer = await worker.answer(*prompt, max_tokens=1)
        assert answer.cached_tokens == cached
        assert await worker.holds(prompt) == set(block_hashes(prompt))


async def test_an_abort_frees_the_request_at_once(worker: Worker) -> None:
    request = engine_pb2.EngineRequest(
        request_id="long",
        tokens=engine_pb2.TokenIds(ids=prompt_of(4, 40)),
        sampling=GREEDY,
        stop=engine_pb2.StopConditions(max_tokens=400, ignore_eos=True),
    )
    call = worker.stub.Generate(engine_pb2.GenerateRequest(request=request), timeout=120)
    tokens = 0
    async for response in call:
        if response.WhichOneof("event") == "delta":
            tokens += len(response.delta.token_ids)
            if tokens < 3:
                continue
            aborted = await worker.stub.Abort(engine_pb2.AbortRequest(request_id="long"))
            assert aborted.was_running or tokens > 3
        else:
            assert response.finished.reason == ABORTED
            assert response.finished.receipt.completion_tokens < 20
    async for loads in worker.stub.WatchLoad(engine_pb2.WatchLoadRequest(), timeout=20):
        if (loads.loads[0].running_requests, loads.loads[0].used_blocks) == (0, 0):
            break


async def test_a_client_that_hangs_up_aborts_its_request(worker: Worker) -> None:
    request = engine_pb2.EngineRequest(
        tokens=engine_pb2.TokenIds(ids=prompt_of(5, 40)),
        sampling=GREEDY,
        stop=engine_pb2.StopConditions(max_tokens=400, ignore_eos=True),
    )
    call = worker.stub.Generate(engine_pb2.GenerateRequest(request=request), timeout=120)
    async for _ in call:
        break
    async for loads in worker.stub.WatchLoad(engine_pb2.WatchLoadRequest(), timeout=20):
        if loads.loads[0].running_requests == 1:
            break
    call.cancel()
    async for loads in worker.stub.WatchLoad(engine_pb2.WatchLoadRequest(), timeout=20):
        if loads.loads[0].running_requests == 0:
            break


async def test_logprobs_are_those_of_the_tokens(worker: Worker) -> None:
    prompt = prompt_of(6, 12)
    sampling = engine_pb2.SamplingParameters(temperature=0, top_logprobs=3, prompt_logprobs=2)
    answer = await worker.answer(*prompt, max_tokens=3, sampling=sampling, request_id="logprobs")
    assert len(answer.logprobs) == 3
    for token, position in zip(answer.text_tokens, answer.logprobs, strict=True):
        assert [one.logprob for one in position.top] == sorted((one.logprob for one in position.top), reverse=True)
        assert len(position.top) == 3
        # Greedy: the chosen token is the best one.
        assert (position.top[0].token_id, position.top[0].logprob) == (token, position.logprob)
    assert answer.finished.large_result
    parts = [part async for part in worker.stub.GetResult(engine_pb2.GetResultRequest(request_id="logprobs"))]
    of_prompt = [one for part in parts for one in part.prompt_logprobs]
    assert len(of_prompt) == len(prompt)
    assert not of_prompt[0].top
    assert all(len(one.top) == 2 and one.logprob < 0 and math.isfinite(one.logprob) for one in of_prompt[1:])


async def test_several_choices_have_tokens_and_reasons_of_their_own(worker: Worker) -> None:
    sampling = engine_pb2.SamplingParameters(temperature=1, seed=3, choices=2)
    answer = await worker.answer(*prompt_of(7, 12), max_tokens=5, sampling=sampling)
    assert {index: len(tokens) for index, tokens in answer.tokens.items()} == {0: 5, 1: 5}
    assert answer.tokens[0] != answer.tokens[1]
    assert (answer.finished.reason, list(answer.finished.choice_reasons)) == (LENGTH, [LENGTH])
    assert answer.finished.receipt.completion_tokens == 10


async def test_a_stop_token_ends_the_text_and_is_not_part_of_it(worker: Worker) -> None:
    prompt = prompt_of(8, 12)
    free = await worker.answer(*prompt, max_tokens=4)
    stop_token = free.text_tokens[2]
    stop = engine_pb2.StopConditions(max_tokens=8, stop_token_ids=[stop_token])
    answer = await worker.answer(*prompt, stop=stop)
    before = free.text_tokens[: free.text_tokens.index(stop_token)]
    assert (answer.text_tokens, answer.finished.reason, answer.finished.stop_token_id) == (before, STOP, stop_token)


async def test_a_seed_and_penalties_are_taken(worker: Worker) -> None:
    prompt = prompt_of(9, 12)
    sampling = engine_pb2.SamplingParameters(
        temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=11, presence_penalty=0.5,
        frequency_penalty=0.5, repetition_penalty=1.1,
    )  # fmt: skip
    first = await worker.answer(*prompt, sampling=sampling)
    second = await worker.answer(*prompt, sampling=sampling)
    assert first.text_tokens == second.text_tokens
    forced = engine_pb2.SamplingParameters(temperature=0, logit_bias={777: 100.0})
    assert (await worker.answer(*prompt, max_tokens=2, sampling=forced)).text_tokens == [777, 777]


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
)
TAG = json.dumps(
    {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</a>"},
    }
)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"json_schema": SCHEMA}, r'\s*\{\s*"ok"\s*:\s*(true|false)\s*,\s*"n"\s*:\s*\d\s*\}\s*'),
        ({"regex": "[ab]{3}c"}, "[ab]{3}c"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"choice": engine_pb2.Choices(texts=["north", "south"])}, "north|south"),
        ({"structural_tag": TAG}, "<a>[0-9]{2}</a>"),
    ],
    ids=["json_schema", "regex", "grammar", "choice", "structural_tag"],
)
async def test_constrained_output_is_what_was_asked_for(
    worker: Worker, text: _core.ModelText, constraint: dict[str, Any], pattern: str
) -> None:
    prompt = text.encode("Answer now: ")
    answer = await worker.answer(
        *prompt,
        stop=engine_pb2.StopConditions(max_tokens=48),
        structured_output=engine_pb2.StructuredOutput(**constraint),
    )
    said = text.decode(answer.text_tokens)
    assert re.fullmatch(pattern, said), said
    assert answer.finished.reason == STOP


@pytest.mark.parametrize(
    ("fields", "code", "named"),
    [
        ({"adapter": "none"}, "UNKNOWN_MODEL", "none"),
        ({"rank": 3}, "INVALID_ARGUMENT", "rank"),
        ({"kv_transfer": engine_pb2.KvTransferParameters(connector="x")}, "UNSUPPORTED_FIELD", "kv_transfer"),
        ({"sampling": engine_pb2.SamplingParameters(top_p=3)}, "INVALID_ARGUMENT", "top_p"),
        ({"sampling": engine_pb2.SamplingParameters(top_logprobs=500)}, "INVALID_ARGUMENT", "top_logprobs"),
        ({"structured_output": engine_pb2.StructuredOutput(json_schema="{")}, "INVALID_ARGUMENT", ""),
    ],
)
async def test_what_cannot_be_honored_is_refused_by_name(
    worker: Worker, fields: dict[str, Any], code: str, named: str
) -> None:
    with pytest.raises(KvistError) as refused:
        await worker.answer(1, 2, 3, **fields)
    assert (refused.value.code, refused.value.not_started) == (code, True)
    assert named in refused.value.message


async def test_extras_are_vllms_own_and_others_are_refused(worker: Worker) -> None:
    extras = struct_pb2.Struct()
    extras.update({"allowed_token_ids": [700, 701]})
    answer = await worker.answer(*prompt_of(12, 8), max_tokens=3, engine_extras=extras)
    assert set(answer.text_tokens) <= {700, 701}
    extras = struct_pb2.Struct()
    extras.update({"kv_cache_report_mode": "full"})
    with pytest.raises(KvistError, match="kv_cache_report_mode"):
        await worker.answer(1, 2, 3, engine_extras=extras)


async def test_a_dead_engine_core_fails_what_runs_and_ends_the_worker(worker: Worker) -> None:
    """The last test of this file: it takes the engine away."""
    if worker.process is None:
        pytest.skip("the worker is another's")
    below = psutil.Process(worker.process.pid).children(recursive=True)
    [core] = [process for process in below if "EngineCore" in " ".join(process.cmdline())]
    running = asyncio.create_task(worker.answer(*prompt_of(13, 20), max_tokens=400))
    async for loads in worker.stub.WatchLoad(engine_pb2.WatchLoadRequest(), timeout=30):
        if loads.loads[0].running_requests:
            break
    core.kill()
    with pytest.raises(KvistError) as failed:
        async with asyncio.timeout(30):
            await running
    assert failed.value.code == "ENGINE_FAILED"
    async with asyncio.timeout(60):
        assert await worker.process.wait() == 1
    _, alive = psutil.wait_procs(below, timeout=20)
    assert not alive
    with pytest.raises(grpc.aio.AioRpcError):
        await worker.stub.Describe(engine_pb2.DescribeRequest(), timeout=5)
