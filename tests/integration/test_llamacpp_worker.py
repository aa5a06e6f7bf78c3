"""A worker process with llama.cpp and a real model: what the ledger claims is what the engine finds."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

pytest.importorskip("xllamacpp")

from kvist import _core
from kvist.engine.v1 import engine_pb2, engine_pb2_grpc
from kvist.errors import KvistError, rpc_errors
from kvist.grpc import open_channel

pytestmark = [
    pytest.mark.integration,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
]
HASH_SEED = 7
BLOCK_SIZE_TOKENS = 8
SLOTS = 2
START_SECONDS = 60


class Worker:
    """A running worker."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, Any], channel: Any) -> None:
        self.process = process
        self.ready = ready
        self.stub = engine_pb2_grpc.EngineServiceStub(channel)

    async def answer(self, *prompt: int, **fields: Any) -> tuple[list[int], engine_pb2.Finished]:
        """Token ids and the end of one request."""
        request = engine_pb2.EngineRequest(tokens=engine_pb2.TokenIds(ids=prompt), **fields)
        tokens: list[int] = []
        with rpc_errors():
            async for response in self.stub.Generate(engine_pb2.GenerateRequest(request=request), timeout=60):
                if response.WhichOneof("event") == "finished":
                    return tokens, response.finished
                tokens += response.delta.token_ids
        raise AssertionError("the stream had no end")

    async def held_blocks(self) -> set[int]:
        """What the ledger claims now."""
        held: set[int] = set()
        async for response in self.stub.WatchKvEvents(engine_pb2.WatchKvEventsRequest(), timeout=10):
            for blocks in response.snapshot.blocks:
                held.update(blocks.block_hashes)
            for event in response.batch.events:
                held.update(event.stored.block_hashes)
                held.difference_update(event.removed.block_hashes)
        return held


async def wait_for(path: Path, process: asyncio.subprocess.Process) -> dict[str, Any]:
    async with asyncio.timeout(START_SECONDS):
        while not path.exists():
            assert process.returncode is None
            await asyncio.sleep(0.02)
    return dict(json.loads(path.read_text()))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    folder = tmp_path_factory.mktemp("worker")
    settings, ready = folder / "settings.json", folder / "ready.json"
    settings.write_text(
        json.dumps(
            {
                "worker_uid": "w-1",
                "model": "smollm2",
                "hash_seed": HASH_SEED,
                "engine": "llamacpp",
                # As they come out of a protobuf `Struct`.
                "engine_arguments": {
                    "slots": float(SLOTS),
                    "contextTokens": 512.0,
                    "blockSizeTokens": 8.0,
                    "tokenizerCacheFolder": str(tmp_path_factory.getbasetemp() / "tokenizers"),
                },
            }
        )
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvist_worker", "--settings-file", settings, "--ready-file", ready)
    )
    try:
        announced = await wait_for(ready, process)
        async with open_channel(announced["grpc_address"], retries=False) as channel:
            yield Worker(process, announced, channel)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def hashes(prompt: list[int]) -> list[int]:
    return _core.block_hashes(HASH_SEED, "smollm2", "", "", prompt, BLOCK_SIZE_TOKENS)


async def test_a_worker_says_what_it_is(worker: Worker) -> None:
    described = (await worker.stub.Describe(engine_pb2.DescribeRequest())).worker
    assert (described.engine, described.model, described.block_size_tokens) == ("llamacpp", "smollm2", 8)
    assert (described.limits.context_tokens, described.limits.max_running_requests) == (512, SLOTS)
    assert described.limits.kv_blocks == SLOTS * 512 // 8
    assert described.capabilities.kv_events
    assert described.incarnation == worker.ready["incarnation"]
    parts = [part async for part in worker.stub.GetTokenizer(engine_pb2.GetTokenizerRequest())]
    header, data = parts[0].header, b"".join(part.data for part in parts[1:])
    assert _core.digest_hex(data) == header.digest == described.tokenizer_digest
    assert (header.bos_token, header.eos_token, list(header.eos_token_ids)) == ("<|im_start|>", "<|im_end|>", [0, 2])
    text = _core.ModelText(data, chat_template=header.chat_template, eos_token=header.eos_token)
    question = json.dumps(
        [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What is the capital of France?"}]
    )
    tokens, finished = await worker.answer(
        *text.encode_chat(question),
        sampling=engine_pb2.SamplingParameters(temperature=0),
        stop=engine_pb2.StopConditions(max_tokens=20),
    )
    assert "Paris" in text.decode(tokens)
    assert (finished.reason, finished.stop_token_id) == (engine_pb2.FINISH_REASON_STOP, 2)
    assert finished.receipt.completion_tokens == len(tokens) + 1


def ask_engine(port: int) -> int:
    """The status of a completion that is asked of the engine's own listener, past its worker."""
    body = json.dumps({"prompt": "Once", "n_predict": 1}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", data=body)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310  Loopback.
            return int(answer.status)
    except urllib.error.HTTPError as refusal:
        return refusal.code


async def test_the_engines_own_listener_is_on_loopback_and_lets_nobody_in(worker: Worker) -> None:
    """It cannot be switched off; the key of its door is kept by nobody."""
    listening = [
        connection.laddr
        for connection in psutil.Process(worker.process.pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {"127.0.0.1"} == {address.ip for address in listening}
    own = {int(worker.ready[name].rpartition(":")[2]) for name in ("grpc_address", "admin_address")}
    engines = {address.port for address in listening} - own
    assert len(engines) == 1
    assert [401] == [await asyncio.to_thread(ask_engine, port) for port in engines]


async def test_what_the_ledger_claims_is_what_the_engine_finds(worker: Worker) -> None:
    rng = random.Random(3)
    history = [[rng.randrange(100, 40_000) for _ in range(rng.randrange(8, 50))] for _ in range(3)]
    hits: Counter[int] = Counter()
    for seed in range(40):
        # Mostly what the slots still hold, and mostly all of it.
        base = rng.choice(history[-rng.choice((1, 2, 3)) :])
        prompt = base[: max(1, len(base) - rng.choice((0, 0, 3, 20)))]
        prompt += [rng.randrange(100, 40_000) for _ in range(rng.choice((0, 0, 1, 7, 8, 20)))]
        held = await worker.held_blocks()
        usable = hashes(prompt)[: _core.usable_blocks(len(prompt), BLOCK_SIZE_TOKENS)]
        claimed = next((position for position, block in enumerate(usable) if block not in held), len(usable))
        tokens, finished = await worker.answer(
            *prompt,
            sampling=engine_pb2.SamplingParameters(seed=seed),
            stop=engine_pb2.StopConditions(max_tokens=rng.choice((1, 2, 9))),
        )
        receipt = finished.receipt
        assert (receipt.cached_tokens // BLOCK_SIZE_TOKENS, receipt.claimed_blocks) == (claimed, claimed)
        hits[claimed] += 1
        history.append((prompt + tokens)[:80])
    # The test has seen hits of several lengths.
    assert len(hits) > 3


async def test_claims_hold_when_slots_run_side_by_side(worker: Worker) -> None:
    rng = random.Random(4)
    base = [rng.randrange(100, 40_000) for _ in range(40)]

    async def ask(index: int) -> engine_pb2.Finished:
        prompt = [*base[: rng.randrange(8, 40)], *range(500 + index, 510 + index)]
        stop = engine_pb2.StopConditions(max_tokens=1 + index % 4)
        return (await worker.answer(*prompt, stop=stop))[1]

    ended = await asyncio.gather(*(ask(index) for index in range(12)))
    assert all(one.receipt.cached_tokens // BLOCK_SIZE_TOKENS >= one.receipt.claimed_blocks for one in ended)
    assert any(one.receipt.claimed_blocks for one in ended)
    assert any(one.receipt.queue_duration.ToMilliseconds() > 0 for one in ended)
    load = (await anext(aiter(worker.stub.WatchLoad(engine_pb2.WatchLoadRequest())))).loads[0]
    assert (load.running_requests, load.waiting_requests, load.outstanding_prefill_tokens) == (0, 0, 0)
    assert load.prefill_tokens_per_second > 0


async def test_an_abort_ends_a_prefill_within_a_step(worker: Worker) -> None:
    rng = random.Random(5)
    prompt = [rng.randrange(100, 40_000) for _ in range(480)]
    running = asyncio.create_task(worker.answer(*prompt, request_id="long"))
    async with asyncio.timeout(30):
        loads = worker.stub.WatchLoad(engine_pb2.WatchLoadRequest())
        async for response in loads:
            # Some of it has been computed, and most of it has not.
            if 0 < response.loads[0].outstanding_prefill_tokens < 480:
                break
        loads.cancel()
        await worker.stub.Abort(engine_pb2.AbortRequest(request_id="long"))
        tokens, finished = await running
        assert (tokens, finished.reason) == ([], engine_pb2.FINISH_REASON_ABORTED)
    # What was computed is claimed, and found.
    held = await worker.held_blocks()
    claimed = sum(block in held for block in hashes(prompt))
    assert claimed >= 64 // BLOCK_SIZE_TOKENS
    _, finished = await worker.answer(*prompt[:65], stop=engine_pb2.StopConditions(max_tokens=1))
    assert finished.receipt.cached_tokens >= 64


async def test_log_probabilities_and_constraints(worker: Worker) -> None:
    request = engine_pb2.EngineRequest(
        tokens=engine_pb2.TokenIds(ids=[1, 4093, 198]),
        sampling=engine_pb2.SamplingParameters(temperature=0, top_logprobs=2),
        stop=engine_pb2.StopConditions(max_tokens=3, ignore_eos=True),
    )
    seen = 0
    async for response in worker.stub.Generate(engine_pb2.GenerateRequest(request=request)):
        for token, entry in zip(response.delta.token_ids, response.delta.logprobs, strict=True):
            seen += 1
            assert entry.logprob <= 0
            # Greedy: the first alternative is the chosen one.
            assert (entry.top[0].token_id, entry.top[0].logprob, len(entry.top)) == (token, entry.logprob, 2)
    assert seen == 3
    constraint = engine_pb2.StructuredOutput(choice=engine_pb2.Choices(texts=["😀", "漢字"]))
    tokens, finished = await worker.answer(1, 4093, 198, structured_output=constraint)
    assert finished.reason == engine_pb2.FINISH_REASON_STOP
    parts = [part async for part in worker.stub.GetTokenizer(engine_pb2.GetTokenizerRequest())]
    text = _core.ModelText(b"".join(part.data for part in parts[1:]))
    # These characters are several tokens each; llama.cpp holds their first parts back.
    assert text.decode(tokens) in {"😀", "漢字"}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"structured_output": engine_pb2.StructuredOutput(regex="a+")}, "UNSUPPORTED_FIELD"),
        ({"structured_output": engine_pb2.StructuredOutput(grammar="root ::= none")}, "INVALID_ARGUMENT"),
        ({"sampling": engine_pb2.SamplingParameters(prompt_logprobs=0)}, "UNSUPPORTED_FIELD"),
    ],
)
async def test_what_cannot_be_honored_is_refused(worker: Worker, fields: dict[str, Any], code: str) -> None:
    with pytest.raises(KvistError) as caught:
        await worker.answer(5, 6, 7, **fields)
    assert caught.value.code == code


async def test_a_reset_empties_the_ledger(worker: Worker) -> None:
    prompt = list(range(1000, 1020))
    await worker.answer(*prompt, stop=engine_pb2.StopConditions(max_tokens=1))
    assert await worker.held_blocks()
    assert (await worker.stub.ResetCache(engine_pb2.ResetCacheRequest())).removed_blocks > 0
    assert await worker.held_blocks() == set()
    _, finished = await worker.answer(*prompt, stop=engine_pb2.StopConditions(max_tokens=1))
    assert (finished.receipt.cached_tokens, finished.receipt.claimed_blocks) == (0, 0)


async def test_choices_are_sequences_of_their_own(worker: Worker) -> None:
    request = engine_pb2.EngineRequest(
        request_id="choices",
        tokens=engine_pb2.TokenIds(ids=range(100, 140)),
        sampling=engine_pb2.SamplingParameters(choices=3, seed=5, temperature=1),
        stop=engine_pb2.StopConditions(max_tokens=12, ignore_eos=True),
    )
    said: dict[int, list[int]] = {}
    finished = engine_pb2.Finished()
    async for response in worker.stub.Generate(engine_pb2.GenerateRequest(request=request), timeout=60):
        said.setdefault(response.delta.index, []).extend(response.delta.token_ids)
        finished.MergeFrom(response.finished)
    # Tokens behind which a character is not whole at the end are counted and not told.
    assert [0, 1, 2] == sorted(said)
    assert all(8 < len(tokens) <= 12 for tokens in said.values())
    assert said[0] != said[1] != said[2]
    assert 36 == finished.receipt.completion_tokens
    assert [finished.reason, *finished.choice_reasons] == [engine_pb2.FINISH_REASON_LENGTH] * 3


async def test_a_call_that_the_model_begins_by_itself_keeps_to_its_schema(worker: Worker) -> None:
    parts = [part async for part in worker.stub.GetTokenizer(engine_pb2.GetTokenizerRequest(), timeout=10)]
    text = _core.ModelText(b"".join(part.data for part in parts[1:]))
    # The pattern shows arguments that are not allowed.
    shown = "".join(
        f"Question: the sum of {left} and {right}\n<tool_call>\n"
        f'{{"name": "add", "arguments": {{"left": {left}, "right": "{right}"}}}}\n</tool_call>\n'
        for left, right in ((12, 33), (45, 51))
    )
    prompt = text.encode(shown + "Question: the sum of 27 and 18\n")
    schema = {
        "type": "object",
        "properties": {"left": {"type": "integer", "minimum": 0, "maximum": 9}, "right": {"enum": [1, 2, 3]}},
        "required": ["left", "right"],
        "additionalProperties": False,
    }
    begin = '<tool_call>\n{"name": "add", "arguments": '
    structures = [{"begin": begin, "schema": schema, "end": "}\n</tool_call>"}]
    tag = json.dumps({"structures": structures, "triggers": ["<tool_call>"]})
    fields = {
        "stop": engine_pb2.StopConditions(max_tokens=60),
        "sampling": engine_pb2.SamplingParameters(temperature=0),
    }
    free, _ = await worker.answer(*prompt, request_id="free", **fields)
    assert '"left": 27, "right": "18"' in text.decode(free)
    held, _ = await worker.answer(
        *prompt, request_id="held", structured_output=engine_pb2.StructuredOutput(structural_tag=tag), **fields
    )
    said = text.decode(held)
    arguments = json.loads(said.partition(begin)[2].partition("}\n</tool_call>")[0])
    assert 0 <= arguments["left"] <= 9
    assert arguments["right"] in {1, 2, 3}
    # Without a call the text is free.
    greeting = text.encode("Hello, my name is")
    spoken, _ = await worker.answer(*greeting, request_id="spoken", **fields)
    constraint = engine_pb2.StructuredOutput(structural_tag=tag)
    same, _ = await worker.answer(*greeting, request_id="same", structured_output=constraint, **fields)
    assert spoken == same
