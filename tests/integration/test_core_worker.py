"""The worker of the core with an engine in Python, and with the simulated one."""

import asyncio
import json
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvist import _core, errors
from kvist.engine.v1 import engine_pb2, engine_pb2_grpc
from kvist.errors import core_errors, rpc_errors
from kvist.grpc import open_channel
from support.echo_engine import DROPPED, FAULT, REFUSED, SILENT, EchoEngine

pytestmark = pytest.mark.integration
SETTINGS = {"worker_uid": "w-1", "model": "echo", "engine": "echo", "hash_seed": 5}
Served = tuple[EchoEngine, engine_pb2_grpc.EngineServiceStub, dict]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    runtime = _core.Runtime(2)
    engine = EchoEngine()
    server = _core.WorkerServer(runtime, json.dumps(SETTINGS), engine)
    async with asyncio.timeout(60):
        addresses = json.loads(await asyncio.to_thread(server.start))
        async with open_channel(addresses["grpc_address"], retries=False) as channel:
            yield engine, engine_pb2_grpc.EngineServiceStub(channel), addresses
        await asyncio.to_thread(server.stop)
    assert engine.closed.is_set()
    runtime.close()


def request(*prompt: int, request_id: str = "", max_tokens: int = 100) -> engine_pb2.GenerateRequest:
    return engine_pb2.GenerateRequest(
        request=engine_pb2.EngineRequest(
            request_id=request_id,
            tokens=engine_pb2.TokenIds(ids=prompt),
            stop=engine_pb2.StopConditions(max_tokens=max_tokens),
        )
    )


async def answer(stub, message: engine_pb2.GenerateRequest) -> tuple[list[int], engine_pb2.Finished]:
    tokens: list[int] = []
    with rpc_errors():
        async for response in stub.Generate(message):
            if response.WhichOneof("event") == "finished":
                return tokens, response.finished
            tokens += response.delta.token_ids
    raise AssertionError("the stream had no end")


async def test_a_request_goes_through_python_and_back(served: Served) -> None:
    engine, stub, addresses = served
    worker = (await stub.Describe(engine_pb2.DescribeRequest())).worker
    assert (worker.engine, worker.block_size_tokens, worker.ranks) == ("echo", 4, 1)
    assert worker.incarnation == addresses["incarnation"]
    prompt = list(range(10))
    tokens, finished = await answer(stub, request(*prompt))
    assert tokens == prompt
    assert finished.receipt.cached_tokens == 0
    tokens, finished = await answer(stub, request(*prompt, max_tokens=3))
    assert (tokens, finished.receipt.cached_tokens) == ([0, 1, 2], 8)
    assert finished.reason == engine_pb2.FINISH_REASON_LENGTH
    # Neither the loop's thread nor one of the runtime.
    assert len(engine.threads) == 1
    assert engine.threads.pop() not in {"MainThread", "echo"}


async def test_the_ledger_hears_the_engine(served: Served) -> None:
    engine, stub, _ = served
    prompt = list(range(9))
    await answer(stub, request(*prompt))
    expected = _core.block_hashes(5, "echo", "", "", prompt, 4)
    stored: list[int] = []
    async for part in stub.WatchKvEvents(engine_pb2.WatchKvEventsRequest()):
        for event in part.batch.events:
            stored += event.stored.block_hashes
        for blocks in part.snapshot.blocks:
            stored += blocks.block_hashes
    assert sorted(expected) == sorted(stored)
    assert engine.host is not None
    assert engine.host.block_hashes(prompt) == expected
    assert engine.host.claimed_blocks(0, expected) == 2
    assert (await stub.ResetCache(engine_pb2.ResetCacheRequest())).removed_blocks == 2
    assert engine.host.claimed_blocks(0, expected) == 0


@pytest.mark.parametrize(
    ("first", "code", "is_secret"),
    [(FAULT, "ENGINE_FAILED", True), (REFUSED, "OVERLOADED", False), (DROPPED, "ENGINE_FAILED", True)],
)
async def test_a_failing_engine_ends_the_request_with_an_error(
    served: Served, first: int, code: str, is_secret: bool
) -> None:
    _, stub, _ = served
    with pytest.raises(errors.KvistError) as caught:
        await answer(stub, request(first, 2, 3))
    assert caught.value.code == code
    assert "secret" not in caught.value.message
    if not is_secret:
        assert caught.value.retry_after_seconds == 1.5
        assert caught.value.not_started


async def test_cancelling_reaches_the_engine(served: Served) -> None:
    engine, stub, _ = served
    call = stub.Generate(request(SILENT, request_id="r-1"))
    while "r-1" not in engine._waiting:
        await asyncio.sleep(0.01)
    call.cancel()
    while engine._waiting:
        await asyncio.sleep(0.01)


async def test_an_abort_ends_a_request_with_its_reason(served: Served) -> None:
    engine, stub, _ = served
    waiting = asyncio.create_task(answer(stub, request(SILENT, request_id="r-2")))
    while "r-2" not in engine._waiting:
        await asyncio.sleep(0.01)
    reason = engine_pb2.ABORT_REASON_DEADLINE
    assert (await stub.Abort(engine_pb2.AbortRequest(request_id="r-2", reason=reason))).was_running
    _, finished = await waiting
    assert (finished.reason, finished.receipt.prompt_tokens) == (engine_pb2.FINISH_REASON_ABORTED, reason)


async def test_many_requests_share_one_courier(served: Served) -> None:
    _, stub, _ = served
    prompts = [[number, *range(number % 7)] for number in range(200)]
    answers = await asyncio.gather(*(answer(stub, request(*prompt)) for prompt in prompts))
    assert prompts == [tokens for tokens, _ in answers]


async def test_draining_aborts_what_does_not_end() -> None:
    runtime = _core.Runtime(2)
    engine = EchoEngine()
    server = _core.WorkerServer(runtime, json.dumps(SETTINGS), engine)
    async with asyncio.timeout(30):
        addresses = json.loads(await asyncio.to_thread(server.start))
        async with open_channel(addresses["grpc_address"], retries=False) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            waiting = asyncio.create_task(answer(stub, request(SILENT, request_id="r")))
            while "r" not in engine._waiting:
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(server.drain, 50) == (0, 1)
            _, finished = await waiting
            assert finished.reason == engine_pb2.FINISH_REASON_ABORTED
            with pytest.raises(errors.UnavailableError):
                await answer(stub, request(1))
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.stop)
    runtime.close()


def test_an_engine_that_cannot_start_is_an_error() -> None:
    class Broken(EchoEngine):
        def start(self, host: _core.EngineHost) -> None:
            raise errors.UnsupportedError("needs a GPU")

    runtime = _core.Runtime(1)
    server = _core.WorkerServer(runtime, json.dumps(SETTINGS), Broken())
    with pytest.raises(errors.UnsupportedError, match="needs a GPU"), core_errors():
        server.start()
    runtime.close()


PROGRAM = textwrap.dedent(
    """
    import json, sys
    sys.path.insert(0, sys.argv[1])
    from kvist import _core
    from support.echo_engine import EchoEngine
    runtime = _core.Runtime(2)
    engine = EchoEngine() if sys.argv[2] == "echo" else None
    server = _core.WorkerServer(runtime, json.dumps({"worker_uid": "w", "model": "m"}), engine)
    if sys.argv[2] != "unstarted":
        server.start()
    relay = _core.Relay(runtime, json.dumps({"nats_url": "nats://127.0.0.1:1", "cluster": "c"}))
    relay.start()
    # Nothing is stopped: the end of the process must do it.
    """
)


@pytest.mark.parametrize("engine", ["echo", "sim", "unstarted"])
def test_a_process_that_just_ends_ends_cleanly(engine: str) -> None:
    tests = Path(__file__).parents[1]
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, tests, engine], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


async def test_the_text_of_a_worker_loads_in_python() -> None:
    runtime = _core.Runtime(1)
    server = _core.WorkerServer(runtime, json.dumps({"worker_uid": "w-1", "model": "sim"}))
    addresses = json.loads(await asyncio.to_thread(server.start))
    async with asyncio.timeout(30), open_channel(addresses["grpc_address"]) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        parts = [part async for part in stub.GetTokenizer(engine_pb2.GetTokenizerRequest())]
    await asyncio.to_thread(server.stop)
    runtime.close()
    header, data = parts[0].header, b"".join(part.data for part in parts)
    text = _core.ModelText(data, chat_template=header.chat_template, eos_token=header.eos_token)
    assert header.digest == text.digest == _core.digest_hex(data)
    for sample in ("Hello, world", "naïve \N{ROBOT FACE}\n\t x", ""):
        assert sample == text.decode(text.encode(sample))
    messages = json.dumps([{"role": "user", "content": "Hi"}])
    assert "Hi" in text.render_chat(messages)
    assert text.encode_chat(messages) != text.encode(text.render_chat(messages) + " ")
    with pytest.raises(errors.InvalidRequestError), core_errors():
        _core.ModelText(b"{}")


async def test_adapters_go_to_engines_that_take_them(served: Served) -> None:
    engine, stub, _ = served
    load = engine_pb2.LoadAdapterRequest(name="french", path="/adapters/french")
    for call in (stub.LoadAdapter(load), stub.UnloadAdapter(engine_pb2.UnloadAdapterRequest(name="french"))):
        with pytest.raises(errors.KvistError) as refused, rpc_errors():
            await call
        assert refused.value.code == "NOT_IMPLEMENTED"
    loaded: dict[str, str] = {}
    engine.load_adapter = loaded.__setitem__
    engine.unload_adapter = loaded.pop
    await stub.LoadAdapter(load)
    assert loaded == {"french": "/adapters/french"}
    await stub.UnloadAdapter(engine_pb2.UnloadAdapterRequest(name="french"))
    assert loaded == {}
    with pytest.raises(errors.KvistError) as refused, rpc_errors():
        await stub.LoadAdapter(engine_pb2.LoadAdapterRequest(name="french"))
    assert [field.field for field in refused.value.fields] == ["path"]
