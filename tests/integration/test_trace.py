"""Traces of requests through a router and a worker, as a collector sees them."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from google.protobuf import json_format

from kvist.controller.v1 import controller_pb2
from kvist.grpc import open_channel
from kvist.router.v1 import router_pb2, router_pb2_grpc
from support.otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver

pytestmark = pytest.mark.integration
LIMIT_SECONDS = 60
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN_ID = "00f067aa0ba902b7"
EXPORTER_THREAD = "kvist-otlp"
ENGINE_TREE = {"kvist.queue": {}, "kvist.prefill": {}, "kvist.decode": {}}
ROUTER_TREE = {"kvist.tokenize": {}, "kvist.select": {}, "kvist.link": {"kvist.engine": ENGINE_TREE}}


def traceparent(*, trace_id: str = TRACE_ID, is_sampled: bool = True) -> str:
    return f"00-{trace_id}-{CLIENT_SPAN_ID}-{int(is_sampled):02x}"


@dataclass
class Mesh:
    """A router and a worker, each a process of its own."""

    worker: asyncio.subprocess.Process
    router: asyncio.subprocess.Process
    worker_addresses: dict[str, Any]
    router_addresses: dict[str, Any]

    def openai(self) -> openai.AsyncOpenAI:
        url = f"http://{self.router_addresses['http_address']}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)

    async def chat(self, header: str) -> None:
        async with self.openai() as client:
            await client.chat.completions.create(
                model="sim",
                messages=[{"role": "user", "content": "Hello there"}],
                max_tokens=8,
                extra_headers={"traceparent": header},
            )

    async def stop(self) -> None:
        """Ends both, which sends what they still have."""
        for process in (self.router, self.worker):
            process.terminate()
            assert await process.wait() == 0


async def ready(process: asyncio.subprocess.Process, path: Path) -> dict[str, Any]:
    while not path.exists():
        assert process.returncode is None
        await asyncio.sleep(0.02)
    return dict(json.loads(path.read_text()))


def cluster_state(worker: dict[str, Any]) -> str:
    target = router_pb2.Target(worker_uid="w-1", address=worker["grpc_address"], pool_uid="pool", pool_revision="1")
    entry = controller_pb2.WorkerEntry(
        target=target, model="sim", incarnation=worker["incarnation"], ranks=1, block_size_tokens=16, namespace="sim"
    )
    pool = controller_pb2.Pool(uid="pool", revision="1", replicas=1)
    state = controller_pb2.ClusterState(
        version=controller_pb2.ClusterVersion(store_epoch=1, revision=1),
        cluster="test",
        models=[controller_pb2.Model(name="sim", uid="m", pools=[pool])],
        workers=[entry],
    )
    return json_format.MessageToJson(state)


@contextlib.asynccontextmanager
async def running_mesh(
    folder: Path, endpoint: str | None, *, engine: str = "sim", **arguments: object
) -> AsyncIterator[Mesh]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environment["OTEL_BSP_SCHEDULE_DELAY"] = "50"
    if endpoint is not None:
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
    settings, state = folder / "worker.json", folder / "state.json"
    pool = {"pool_uid": "pool", "pool_revision": "1"}
    of_engine = {"engine": engine, "engine_arguments": arguments or {"decodeStepMs": 2}}
    settings.write_text(json.dumps({"worker_uid": "w-1", "model": "sim", **pool, **of_engine}))
    async with asyncio.timeout(LIMIT_SECONDS), contextlib.AsyncExitStack() as stack:

        async def start(module: str, *arguments: str) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
            path = folder / f"{module}.ready"
            log = stack.enter_context((folder / f"{module}.log").open("w"))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *arguments, "--ready-file", str(path)), env=environment, stderr=log
            )
            stack.push_async_callback(process.wait)
            stack.callback(lambda: process.kill() if process.returncode is None else None)
            return process, await ready(process, path)

        worker, worker_addresses = await start("kvist_worker", "--settings-file", str(settings))
        state.write_text(cluster_state(worker_addresses))
        router, router_addresses = await start("kvist_router", "--set", f"cluster_state_file={state}")
        async with open_channel(router_addresses["grpc_address"]) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            while True:
                targets = (await stub.ListTargets(router_pb2.ListTargetsRequest())).targets
                if targets and not targets[0].excluded_reason:
                    break
                await asyncio.sleep(0.02)
        yield Mesh(worker, router, worker_addresses, router_addresses)


@pytest.fixture
async def receiver() -> AsyncIterator[OtlpReceiver]:
    async with otlp_receiver() as running:
        yield running


@pytest.fixture
async def mesh(tmp_path: Path, receiver: OtlpReceiver) -> AsyncIterator[Mesh]:
    async with running_mesh(tmp_path, receiver.endpoint) as running:
        yield running


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


def tree(spans: list[ReceivedSpan], parent_id: str) -> dict[str, Any]:
    return {span.name: tree(spans, span.span_id) for span in spans if span.parent_id == parent_id}


def assert_is_sound(spans: list[ReceivedSpan]) -> None:
    """One trace, in which nothing ends outside of what it is part of."""
    assert {TRACE_ID} == {span.trace_id for span in spans}
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        assert span.start_nanos <= span.end_nanos
        if span.parent_id != CLIENT_SPAN_ID:
            parent = by_id[span.parent_id]
            assert parent.start_nanos <= span.start_nanos, (parent, span)
            assert span.end_nanos <= parent.end_nanos, (parent, span)
    named = {span.name: span for span in spans}
    queue, prefill, decode = (named[f"kvist.{phase}"] for phase in ("queue", "prefill", "decode"))
    assert (queue.end_nanos, prefill.end_nanos) == (prefill.start_nanos, decode.start_nanos)
    services = {name: span.service for name, span in named.items()}
    of_worker = {"kvist.engine", *ENGINE_TREE}
    assert services == {name: "kvist-worker" if name in of_worker else "kvist-router" for name in services}


def assert_decoded_eight_tokens(spans: list[ReceivedSpan]) -> None:
    (decode,) = (span for span in spans if span.name == "kvist.decode")
    # Seven steps of 2 ms follow the first token.
    assert decode.end_nanos - decode.start_nanos > 10_000_000


def of(span: ReceivedSpan, *names: str) -> dict[str, Any]:
    return {name: span.attributes.get(name) for name in names}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_http_request_is_one_trace_below_the_client(
    mesh: Mesh, receiver: OtlpReceiver, is_stream: bool
) -> None:
    async with mesh.openai() as client:
        answer = await client.chat.completions.create(
            model="sim",
            messages=[{"role": "user", "content": "Hello there"}],
            max_tokens=8,
            temperature=0.5,
            stream=is_stream,
            extra_headers={"traceparent": traceparent(), "x-request-id": "mine"},
        )
        if is_stream:
            async for _ in answer:
                pass
    expected = {"kvist.edge": ROUTER_TREE}
    await until(lambda: tree(receiver.spans, CLIENT_SPAN_ID) == expected)
    assert_is_sound(receiver.spans)
    assert_decoded_eight_tokens(receiver.spans)
    named = {span.name: span for span in receiver.spans}
    edge, engine = named["kvist.edge"], named["kvist.engine"]
    kinds = {name: span.kind for name, span in named.items() if span.kind != "INTERNAL"}
    assert {"kvist.edge": "SERVER", "kvist.link": "CLIENT", "kvist.engine": "SERVER"} == kinds
    prompt_tokens = edge.attributes["gen_ai.usage.input_tokens"]
    assert prompt_tokens > 0
    seconds = edge.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < seconds < (edge.end_nanos - edge.start_nanos) / 1e9
    assert {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvist",
        "gen_ai.request.model": "sim",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "kvist.request_id": "router-0-mine",
        "kvist.outcome": "length",
    } == edge.attributes
    assert {
        "gen_ai.provider.name": "sim",
        "gen_ai.request.model": "sim",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "kvist.request_id": "router-0-mine",
        "kvist.worker_uid": "w-1",
        "kvist.rank": 0,
    } == engine.attributes
    place = {"kvist.worker_uid": "w-1", "kvist.rank": 0, "kvist.attempt": 1}
    assert {**place, "kvist.candidates": 1, "kvist.matched_blocks": 0} == named["kvist.select"].attributes
    assert {**place, "kvist.outcome": "length"} == named["kvist.link"].attributes


async def test_a_grpc_call_is_the_same_trace_below_an_rpc(mesh: Mesh, receiver: OtlpReceiver) -> None:
    method = "kvist.router.v1.RouterService/Generate"
    async with open_channel(mesh.router_addresses["grpc_address"]) as channel:
        request = router_pb2.GenerateRequest(model="sim", prompt=router_pb2.Prompt(text="Once upon a time"))
        request.stop.max_tokens = 8
        call = router_pb2_grpc.RouterServiceStub(channel).Generate(request, metadata=[("traceparent", traceparent())])
        assert [response async for response in call][-1].finished.usage.completion_tokens == 8
    await until(lambda: tree(receiver.spans, CLIENT_SPAN_ID) == {method: ROUTER_TREE})
    assert_is_sound(receiver.spans)
    assert_decoded_eight_tokens(receiver.spans)
    (span,) = (span for span in receiver.spans if span.name == method)
    expected = {
        "rpc.system.name": "grpc",
        "rpc.method": method,
        "rpc.response.status_code": "OK",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "sim",
        "gen_ai.usage.output_tokens": 8,
        "http.route": None,
    }
    assert ("SERVER", expected) == (span.kind, of(span, *expected))


async def test_the_phases_of_an_engine_written_in_python_are_those_of_its_receipt(
    tmp_path: Path, receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("xllamacpp")
    cache = str(tmp_path_factory.getbasetemp() / "tokenizers")
    arguments = {"contextTokens": 512, "blockSizeTokens": 16, "tokenizerCacheFolder": cache}
    async with running_mesh(tmp_path, receiver.endpoint, engine="llamacpp", **arguments) as mesh:
        await mesh.chat(traceparent())
        await until(lambda: tree(receiver.spans, CLIENT_SPAN_ID) == {"kvist.edge": ROUTER_TREE})
    assert_is_sound(receiver.spans)
    (engine,) = (span for span in receiver.spans if span.name == "kvist.engine")
    assert {"gen_ai.provider.name": "llamacpp"} == of(engine, "gen_ai.provider.name")


async def test_a_refusal_is_told_once_and_a_fault_of_the_client_is_no_error(mesh: Mesh, receiver: OtlpReceiver) -> None:
    header = {"traceparent": traceparent()}
    async with mesh.openai() as client:
        # One that the edge refuses, and one that the router does.
        for model, wrong in (("sim", {"max_tokens": -1}), ("other", {})):
            with pytest.raises(openai.APIStatusError):
                await client.completions.create(model=model, prompt="x", extra_headers=header, extra_body=wrong)
    await until(lambda: len(receiver.spans) == 2)
    names = ("error.type", "http.response.status_code", "kvist.outcome")
    refusals = [tuple(span.attributes.get(name) for name in names) for span in receiver.spans]
    assert [("INVALID_ARGUMENT", 400, None), ("UNKNOWN_MODEL", 404, "UNKNOWN_MODEL")] == refusals
    assert not any(span.is_error for span in receiver.spans)


async def test_a_client_that_goes_away_ends_its_trace(mesh: Mesh, receiver: OtlpReceiver) -> None:
    async with mesh.openai() as client:
        stream = await client.completions.create(
            model="sim", prompt="x", max_tokens=3_000, stream=True, extra_headers={"traceparent": traceparent()}
        )
        await anext(aiter(stream))
        await stream.close()
    await until(lambda: tree(receiver.spans, CLIENT_SPAN_ID) == {"kvist.edge": ROUTER_TREE})
    named = {span.name: span for span in receiver.spans}
    assert "cancelled" == named["kvist.edge"].attributes["kvist.outcome"]
    assert "cancelled" == named["kvist.link"].attributes["kvist.outcome"]
    assert ["aborted"] == named["kvist.engine"].attributes["gen_ai.response.finish_reasons"]
    assert 0 < named["kvist.engine"].attributes["gen_ai.usage.output_tokens"] < 3_000
    assert not any(span.is_error for span in receiver.spans)


async def test_a_trace_that_the_client_does_not_record_is_not_recorded(mesh: Mesh, receiver: OtlpReceiver) -> None:
    await mesh.chat(traceparent(trace_id="f" * 32, is_sampled=False))
    await mesh.chat(traceparent())
    await mesh.stop()
    assert {"kvist.edge": ROUTER_TREE} == tree(receiver.spans, CLIENT_SPAN_ID)
    assert {TRACE_ID} == {span.trace_id for span in receiver.spans}


async def test_a_request_without_a_trace_begins_one(mesh: Mesh, receiver: OtlpReceiver) -> None:
    await mesh.chat("")
    await mesh.stop()
    assert {"kvist.edge": ROUTER_TREE} == tree(receiver.spans, "")


def threads(process: asyncio.subprocess.Process) -> set[str]:
    return {(task / "comm").read_text().strip() for task in Path(f"/proc/{process.pid}/task").iterdir()}


def peers(process: asyncio.subprocess.Process) -> set[str]:
    """Where a process has connected to, and not who has connected to it."""
    connections = psutil.Process(process.pid).net_connections("tcp")
    listening = {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}
    outward = [item for item in connections if item.raddr and item.laddr.port not in listening]
    return {f"{connection.raddr.ip}:{connection.raddr.port}" for connection in outward}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have names in Linux's /proc")
@pytest.mark.parametrize("is_configured", [True, False])
async def test_without_an_endpoint_there_is_no_exporter(
    tmp_path: Path, receiver: OtlpReceiver, is_configured: bool
) -> None:
    endpoint = receiver.endpoint if is_configured else None
    async with running_mesh(tmp_path, endpoint) as mesh:
        await mesh.chat(traceparent())
        if is_configured:
            await until(lambda: len(receiver.spans) == 8)
        collector = {receiver.endpoint.removeprefix("http://")} if is_configured else set()
        assert {mesh.worker_addresses["grpc_address"], *collector} == peers(mesh.router)
        assert collector == peers(mesh.worker)
        for process in (mesh.router, mesh.worker):
            assert is_configured == (EXPORTER_THREAD in threads(process))
        await mesh.stop()
    assert is_configured == bool(receiver.spans)
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert TRACE_ID in logs
    assert "otlp" not in logs.lower()
