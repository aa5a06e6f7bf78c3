"""A worker that speaks for a server that runs already: what it asks of it, what it takes, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import struct_pb2
from google.protobuf.duration_pb2 import Duration

from kvist import _core
from kvist.engine.v1 import engine_pb2, engine_pb2_grpc
from kvist.errors import KvistError, core_errors, rpc_errors
from kvist.grpc import open_channel
from support.stock_process import StockProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
LIMIT_SECONDS = 60
BLOCK_SIZE = 16


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StockProcess]:
    server = StockProcess(tmp_path)
    yield server
    server.kill()


class Worker:
    """A worker of the core, in this process."""

    def __init__(self, stub: engine_pb2_grpc.EngineServiceStub, core: _core.WorkerServer) -> None:
        self.stub = stub
        self.core = core

    async def describe(self) -> engine_pb2.WorkerDescription:
        return (await self.stub.Describe(engine_pb2.DescribeRequest())).worker

    async def answer(self, *prompt: int, **fields: Any) -> tuple[list[int], engine_pb2.Finished]:
        tokens: list[int] = []
        fields.setdefault("stop", engine_pb2.StopConditions(max_tokens=4))
        request = engine_pb2.EngineRequest(tokens=engine_pb2.TokenIds(ids=prompt), **fields)
        with rpc_errors():
            async for response in self.stub.Generate(engine_pb2.GenerateRequest(request=request)):
                if response.WhichOneof("event") == "finished":
                    return tokens, response.finished
                tokens += response.delta.token_ids
        raise AssertionError("the stream had no end")

    async def held_blocks(self, rank: int = 0) -> set[int]:
        held: set[int] = set()
        async for response in self.stub.WatchKvEvents(engine_pb2.WatchKvEventsRequest(ranks=[rank]), timeout=10):
            for blocks in response.snapshot.blocks:
                held.update(blocks.block_hashes)
            for event in response.batch.events:
                held.update(event.stored.block_hashes)
                if event.WhichOneof("event") == "cleared":
                    held.clear()
        return held


@contextlib.asynccontextmanager
async def attached(server: StockProcess, **arguments: Any) -> AsyncIterator[Worker]:
    settings = {
        "worker_uid": "w-1",
        "model": "m",
        "hash_seed": 5,
        "engine": "attached",
        "engine_arguments": {**server.arguments, **arguments},
    }
    runtime = _core.Runtime(2)
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            with core_errors():
                core = _core.WorkerServer(runtime, json.dumps(settings))
                addresses = json.loads(await asyncio.to_thread(core.start))
            async with open_channel(addresses["grpc_address"], retries=False) as channel:
                yield Worker(engine_pb2_grpc.EngineServiceStub(channel), core)
            await asyncio.to_thread(core.stop)
    finally:
        runtime.close()


async def until(what: str, holds: Callable[[], Any]) -> None:
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            while not await holds():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"never came true: {what}") from None


async def refusal(server: StockProcess, **arguments: Any) -> str:
    with pytest.raises(KvistError) as refused:
        async with attached(server, **arguments):
            pass
    return str(refused.value)


@pytest.mark.parametrize("flags", [(), ("--no-generate",)], ids=["generate", "completions"])
async def test_requests_are_served_and_their_blocks_accounted_for(server: StockProcess, flags: tuple[str, ...]) -> None:
    server.start(*flags)
    prompt = list(range(60, 100))
    async with attached(server) as worker:
        about = await worker.describe()
        assert (about.engine, about.block_size_tokens, about.ranks) == ("attached", BLOCK_SIZE, 1)
        path = "/v1/completions" if flags else "/inference/v1/generate"
        assert about.engine_version == f"0.32.0 at {path}"
        assert about.capabilities.kv_events
        assert about.capabilities.logprobs == (not flags)
        tokens, finished = await worker.answer(*prompt, request_id="r-1")
        assert tokens == [99, 98, 97, 96]
        assert finished.reason == engine_pb2.FINISH_REASON_LENGTH
        assert (finished.receipt.prompt_tokens, finished.receipt.completion_tokens) == (40, 4)
        assert finished.receipt.cached_tokens == 0
        expected = set(_core.block_hashes(5, "m", "", "", prompt, BLOCK_SIZE))

        async def is_known() -> bool:
            return await worker.held_blocks() == expected

        await until("the ledger holds the prompt", is_known)
        _, again = await worker.answer(*prompt)
        assert again.receipt.cached_tokens == 32
        assert again.receipt.block_size_tokens == BLOCK_SIZE
        seen = server.log()["seen"][0]
        assert seen["headers"]["x-request-id"] == "r-1"
        assert "x-data-parallel-rank" not in seen["headers"]


async def test_a_request_arrives_in_the_servers_words(server: StockProcess) -> None:
    server.start()
    extras = struct_pb2.Struct()
    extras.update({"allowed_token_ids": [1, 2], "session_id": "s"})
    async with attached(server, **{"scheduling-policy": "priority"}) as worker:
        await worker.answer(
            *(1, 2, 3),
            sampling=engine_pb2.SamplingParameters(temperature=0.7, top_k=5, seed=9, logit_bias={4: -1.5}),
            stop=engine_pb2.StopConditions(max_tokens=3, min_tokens=2, stop_token_ids=[7], ignore_eos=True),
            structured_output=engine_pb2.StructuredOutput(json_schema='{"type":"object"}'),
            adapter="poet",
            cache_salt="salt",
            priority=-2,
            engine_extras=extras,
            traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        )
        seen = server.last_seen()
    assert seen["body"]["sampling_params"] == {
        "temperature": 0.7,
        "top_k": 5,
        "seed": 9,
        "logit_bias": {"4": -1.5},
        "max_tokens": 3,
        "min_tokens": 2,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "structured_outputs": {"json": '{"type":"object"}'},
        "allowed_token_ids": [1, 2],
        "detokenize": False,
    }
    assert {key: seen["body"][key] for key in ("model", "cache_salt", "priority", "token_ids")} == {
        "model": "poet",
        "cache_salt": "salt",
        "priority": -2,
        "token_ids": [1, 2, 3],
    }
    assert seen["headers"]["x-session-id"] == "s"
    assert seen["headers"]["traceparent"].startswith("00-0af76519")


async def test_salts_and_adapters_have_namespaces_of_their_own(server: StockProcess) -> None:
    server.start()
    prompt = list(range(60, 100))
    async with attached(server) as worker:
        await worker.answer(*prompt)
        await worker.answer(*prompt, cache_salt="s")
        await worker.answer(*prompt, adapter="poet")
        expected = set()
        for adapter, salt in (("", ""), ("", "s"), ("poet", "")):
            expected |= set(_core.block_hashes(5, "m", adapter, salt, prompt, BLOCK_SIZE))
        assert len(expected) == 6

        async def is_known() -> bool:
            return await worker.held_blocks() == expected

        await until("the ledger holds all three", is_known)


async def test_each_rank_is_pinned_and_has_its_own_account(server: StockProcess) -> None:
    server.start("--ranks=2")
    prompt = list(range(60, 100))
    async with attached(server) as worker:
        assert (await worker.describe()).ranks == 2
        await worker.answer(*prompt, rank=1)
        assert server.last_seen()["headers"]["x-data-parallel-rank"] == "1"

        async def is_known() -> bool:
            return bool(await worker.held_blocks(1))

        await until("rank 1 holds the prompt", is_known)
        assert not await worker.held_blocks(0)


async def test_what_the_server_cannot_do_is_refused_and_never_sent(server: StockProcess) -> None:
    server.start("--no-generate")
    transfer, hints, other = struct_pb2.Struct(), struct_pb2.Struct(), struct_pb2.Struct()
    other.update({"kv_cache_report_mode": "full"})
    cases = {
        "kv_transfer": {"kv_transfer": engine_pb2.KvTransferParameters(connector="c", parameters=transfer)},
        "kv_hints": {"kv_hints": hints},
        "priority": {"priority": 1},
        "sampling.top_logprobs": {"sampling": engine_pb2.SamplingParameters(top_logprobs=1)},
        "sampling.prompt_logprobs": {"sampling": engine_pb2.SamplingParameters(prompt_logprobs=1)},
        "engine_extras.kv_cache_report_mode": {"engine_extras": other},
    }
    async with attached(server) as worker:
        for field, fields in cases.items():
            with pytest.raises(KvistError) as refused:
                await worker.answer(1, 2, 3, **fields)
            assert refused.value.code == "UNSUPPORTED_FIELD"
            assert [violation.field for violation in refused.value.fields] == [field]
        with pytest.raises(KvistError) as refused:
            await worker.answer(1, 2, 3, adapter="stock")
        assert refused.value.code == "UNKNOWN_MODEL"
        for call in (
            worker.stub.LoadAdapter(engine_pb2.LoadAdapterRequest(name="a", path="/a")),
            worker.stub.ResetCache(engine_pb2.ResetCacheRequest()),
        ):
            with pytest.raises(KvistError) as refused, rpc_errors():
                await call
            assert refused.value.code == "NOT_IMPLEMENTED"
        assert server.log()["seen"] == []


@pytest.mark.parametrize(
    ("flags", "arguments", "reason"),
    [
        ((), {"block-size": 32}, "engine_arguments.block-size: is 16 at the server and 32 here"),
        ((), {"max-model-len": 7}, "engine_arguments.max-model-len: is 4096 at the server and 7 here"),
        ((), {"model": "other"}, "engine_arguments.model: the server does not serve other; it serves stock"),
        ((), {"model": "poet"}, "engine_arguments.model: the server does not serve poet"),
        (("--other-tokenizer",), {}, "engine_arguments.tokenizer: is not the server's"),
        (("--no-replay",), {}, "engine_arguments.kv-events: the server has no replay socket"),
        (("--no-cached-tokens",), {}, "start it with --enable-prompt-tokens-details"),
        (("--no-events",), {"kv-events": True}, "rank 0 of the server publishes none"),
        (("--silent",), {}, "engine_arguments.block-size: the server does not say it"),
        (("--no-generate",), {"api": "generate"}, "/inference/v1/generate answers 403"),
        (("--text-only",), {}, "/v1/completions does not return token ids"),
        ((), {"lora": 1}, "unknown field `lora`"),
        ((), {"tokenizer": "/nowhere"}, "engine_arguments.tokenizer: tokenizer.json cannot be read"),
        ((), {"url": "http://127.0.0.1:1"}, "the server cannot be reached"),
    ],
)
async def test_a_server_that_does_not_fit_is_refused_with_the_reason(
    server: StockProcess, flags: tuple[str, ...], arguments: dict[str, Any], reason: str
) -> None:
    server.start(*flags)
    assert reason in await refusal(server, **arguments)


async def test_a_key_is_sent_to_the_server_that_it_is_for(
    server: StockProcess, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.start("--api-key=sk-1")
    assert "/v1/models answers with status 401" in await refusal(server)
    keys = tmp_path_factory.mktemp("keys")
    monkeypatch.setenv("KVIST_ATTACHED_KEYS", str(keys))
    (keys / "stock").write_text(f"{server.url}\nsk-1\n")
    (keys / "other").write_text("http://other:1\nsk-1\n")
    assert "engine_arguments.api-key: is for another server" in await refusal(server, **{"api-key": "other"})
    async with attached(server, **{"api-key": "stock"}) as worker:
        tokens, _ = await worker.answer(1, 2, 3)
        assert len(tokens) == 4


async def test_a_server_without_events_is_served_and_claims_nothing(server: StockProcess) -> None:
    server.start("--no-events", "--no-cached-tokens")
    async with attached(server) as worker:
        assert not (await worker.describe()).capabilities.kv_events
        tokens, _ = await worker.answer(*range(60, 100))
        assert len(tokens) == 4
        assert not await worker.held_blocks()


async def test_a_reset_is_seen_where_the_server_allows_it(server: StockProcess) -> None:
    server.start("--dev-mode")
    async with attached(server) as worker:
        await worker.answer(*range(60, 100))

        async def is_known() -> bool:
            return bool(await worker.held_blocks())

        await until("the prompt is held", is_known)
        reset = await worker.stub.ResetCache(engine_pb2.ResetCacheRequest())
        assert reset.removed_blocks == 2
        assert not await worker.held_blocks()


@pytest.mark.parametrize(
    ("mode", "code"),
    [
        ("400", "INVALID_ARGUMENT"),
        ("429", "OVERLOADED"),
        ("503", "OVERLOADED"),
        ("500", "ENGINE_FAILED"),
        ("cut", "ENGINE_LOST"),
        ("garbage", "ENGINE_FAILED"),
        ("error event", "ENGINE_FAILED"),
        ("no reason", "ENGINE_FAILED"),
    ],
)
async def test_a_fault_is_one_error_of_the_table(server: StockProcess, mode: str, code: str) -> None:
    server.start()
    async with attached(server) as worker:
        server.script(mode)
        with pytest.raises(KvistError) as failed:
            await worker.answer(1, 2, 3)
        assert failed.value.code == code
        if mode == "429":
            assert failed.value.retry_after_seconds == 3
        if mode == "400":
            assert failed.value.message == "top_k must be at least -1"
        server.script()
        tokens, _ = await worker.answer(1, 2, 3)
        assert len(tokens) == 4


async def test_an_abort_closes_the_connection(server: StockProcess) -> None:
    server.start()
    async with attached(server) as worker:
        server.script(step_seconds=0.05)
        asking = asyncio.create_task(
            worker.answer(1, 2, 3, request_id="long", stop=engine_pb2.StopConditions(max_tokens=1_000))
        )

        async def runs() -> bool:
            return server.log()["running"] == 1

        await until("the server computes", runs)
        assert (await worker.stub.Abort(engine_pb2.AbortRequest(request_id="long"))).was_running
        tokens, finished = await asking
        assert finished.reason == engine_pb2.FINISH_REASON_ABORTED
        assert finished.receipt.completion_tokens == len(tokens) < 1_000

        async def is_aborted() -> bool:
            log = server.log()
            return log["aborted"] == 1 and log["running"] == 0

        await until("the server has stopped", is_aborted)


@pytest.mark.parametrize("mode", ["silent", "hang"])
async def test_a_server_that_hangs_loses_the_request_at_its_deadline(server: StockProcess, mode: str) -> None:
    server.start()
    async with attached(server) as worker:
        server.script(mode)
        tokens, finished = await worker.answer(1, 2, 3, time_left=Duration(seconds=2))
        assert finished.reason == engine_pb2.FINISH_REASON_ABORTED
        assert len(tokens) == (0 if mode == "silent" else 2)

        async def is_aborted() -> bool:
            log = server.log()
            return log["aborted"] == 1 and log["running"] == 0

        await until("the server has stopped", is_aborted)
        # The server lives, and so does its worker.
        server.script()
        tokens, _ = await worker.answer(1, 2, 3)
        assert len(tokens) == 4


@pytest.mark.parametrize("how", ["die", "freeze", "dead"])
async def test_a_server_that_is_gone_fails_the_worker(server: StockProcess, how: str) -> None:
    server.start()
    async with attached(server, **{"dead-after-seconds": 1.0}) as worker:
        server.script("die" if how == "die" else "hang")
        asking = asyncio.create_task(worker.answer(1, 2, 3))
        if how != "die":

            async def runs() -> bool:
                return server.log()["running"] == 1

            await until("the server computes", runs)
        if how == "freeze":
            server.freeze()
        if how == "dead":
            server.script("dead")
        with pytest.raises(KvistError) as failed:
            await asking
        assert failed.value.code == ("ENGINE_LOST" if how == "die" else "ENGINE_FAILED")

        async def has_failed() -> bool:
            return worker.core.has_failed()

        await until("the worker says that its engine is gone", has_failed)


async def test_load_is_that_of_all_who_ask_the_server(server: StockProcess) -> None:
    server.start()
    async with attached(server) as worker:
        server.script(step_seconds=0.05)
        # Somebody else's request, past the mesh.
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = json.dumps(
            {"model": "stock", "stream": True, "token_ids": [1], "sampling_params": {"max_tokens": 2_000}}
        ).encode()
        head = f"POST /inference/v1/generate HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readline()
        async for loads in worker.stub.WatchLoad(engine_pb2.WatchLoadRequest(), timeout=LIMIT_SECONDS):
            [load] = loads.loads
            if load.running_requests == 1:
                assert load.total_blocks == 1_000
                break
        writer.close()
