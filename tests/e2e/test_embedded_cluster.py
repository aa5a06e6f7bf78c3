"""The mesh as its users meet it: real processes, the official OpenAI client, gRPC, and a worker that is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import openai
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from kvist.router.v1 import router_pb2, router_pb2_grpc
from support.embedded import EmbeddedCluster, eventually

LONG_PROMPT = "Tell me about the prefix tree of all prompts. " * 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    cluster = EmbeddedCluster(tmp_path_factory.mktemp("kvist"))
    cluster.up("--workers=2", '--engine-arguments={"decodeStepMicroseconds": 20000}')
    yield cluster
    cluster.down()


@pytest.fixture
def client(cluster: EmbeddedCluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{cluster.address('http')}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def router(cluster: EmbeddedCluster) -> Iterator[router_pb2_grpc.RouterServiceStub]:
    with grpc.insecure_channel(cluster.address("router")) as channel:
        yield router_pb2_grpc.RouterServiceStub(channel)


def ask(client: openai.OpenAI, text: str, **more: object) -> object:
    return client.chat.completions.create(
        model="sim", messages=[{"role": "user", "content": text}], max_tokens=8, temperature=0, **more
    )


def test_the_openai_client_gets_equal_answers_whole_and_streamed(client: openai.OpenAI) -> None:
    assert ["sim"] == [model.id for model in client.models.list()]
    whole = ask(client, "hello")
    chunks = list(ask(client, "hello", stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content == streamed
    assert "length" == whole.choices[0].finish_reason
    assert (8, whole.usage.prompt_tokens) == (chunks[-1].usage.completion_tokens, chunks[-1].usage.prompt_tokens)
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("nothing")
    assert "model_not_found" == refused.value.code


def test_a_prompt_returns_to_the_worker_that_holds_it(cluster: EmbeddedCluster, client: openai.OpenAI) -> None:
    first = ask(client, LONG_PROMPT)
    usable = (first.usage.prompt_tokens - 1) // 32 * 32
    again = eventually(
        "the index knows the blocks",
        lambda: (answer := ask(client, LONG_PROMPT)).usage.prompt_tokens_details.cached_tokens and answer,
    )
    assert usable == again.usage.prompt_tokens_details.cached_tokens
    explained = cluster.kvist("route", "explain", again.id)
    assert "EXACT" in explained
    assert f"{usable} of {first.usage.prompt_tokens} tokens cached" in explained
    assert {"SOURCE_STATE_EXACT"} == {source["state"] for source in cluster.sources()}


def test_grpc_clients_get_health_and_rich_errors(
    cluster: EmbeddedCluster, router: router_pb2_grpc.RouterServiceStub
) -> None:
    with grpc.insecure_channel(cluster.address("router")) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "readiness", "kvist.router.v1.RouterService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert health_pb2.HealthCheckResponse.SERVING == answer.status
    with pytest.raises(grpc.RpcError) as refused:
        router.Tokenize(router_pb2.TokenizeRequest(model="sim"), timeout=10)
    assert grpc.StatusCode.INVALID_ARGUMENT is refused.value.code()
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in rpc_status.from_call(refused.value).details:
        detail.Unpack(info)
        detail.Unpack(request)
    assert ("INVALID_ARGUMENT", "kvist.dev") == (info.reason, info.domain)
    assert ["prompt"] == [violation.field for violation in request.field_violations]
    with pytest.raises(grpc.RpcError) as later:
        router.Embed(router_pb2.EmbedRequest(model="sim"), timeout=10)
    assert grpc.StatusCode.UNIMPLEMENTED is later.value.code()


def test_tokens_survive_the_way_to_text_and_back(router: router_pb2_grpc.RouterServiceStub) -> None:
    request = router_pb2.TokenizeRequest(model="sim")
    request.prompt.text = "naïve 🌿 text"
    ids = router.Tokenize(request, timeout=10).token_ids
    answer = router.Detokenize(router_pb2.DetokenizeRequest(model="sim", token_ids=ids), timeout=10)
    assert "naïve 🌿 text" == answer.text


def test_a_killed_worker_ends_its_stream_with_an_error_and_comes_back(
    cluster: EmbeddedCluster, client: openai.OpenAI, router: router_pb2_grpc.RouterServiceStub
) -> None:
    stream = client.chat.completions.create(
        model="sim", messages=[{"role": "user", "content": "go on"}], max_tokens=3000, stream=True
    )
    chunks = iter(stream)
    for _ in range(4):
        next(chunks)
    targets = router.ListTargets(router_pb2.ListTargetsRequest(), timeout=10).targets
    busy = next(target.target.worker_uid for target in targets if target.reservations)
    before = {source["source"]["worker_uid"]: source["source"]["incarnation"] for source in cluster.sources()}
    cluster.kill(busy)
    with pytest.raises(openai.APIError) as cut:
        for chunk in chunks:
            assert chunk.choices[0].finish_reason is None
    assert "engine_lost" == cut.value.code
    ask(client, "the other serves on")

    def is_back() -> bool:
        after = {source["source"]["worker_uid"]: source for source in cluster.sources()}
        return (
            set(before) == set(after)
            and {"SOURCE_STATE_EXACT"} == {source["state"] for source in after.values()}
            and int(after[busy]["source"]["incarnation"]) > int(before[busy])
        )

    eventually("the worker is back with a new incarnation and all sources are exact", is_back)
    targets = router.ListTargets(router_pb2.ListTargetsRequest(), timeout=10).targets
    assert [0, 0] == [target.reservations for target in targets]


def test_a_second_cluster_and_a_taken_port_are_refused_with_a_hint(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    assert "kvist down" in cluster.kvist("up", code=2)
    port = cluster.address("http").rpartition(":")[2]
    other = EmbeddedCluster(tmp_path / "other")
    refused = other.kvist("up", f"--http-port={port}", "--grpc-port=0", "--detach", code=8)
    assert "--http-port" in refused
