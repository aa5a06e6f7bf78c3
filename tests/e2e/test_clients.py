"""The mesh as its clients meet it, on the simulated engine: gRPC with rich errors, the OpenAI client, the commands."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import anthropic
import grpc
import openai
import pytest
import structlog
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from kvist import telemetry
from kvist.router.v1 import router_pb2, router_pb2_grpc
from kvist.settings import TelemetrySettings
from support.embedded import EmbeddedCluster, eventually


@pytest.fixture(scope="module")
def cluster(start: Callable[..., EmbeddedCluster]) -> EmbeddedCluster:
    return start("--engine=sim", "--workers=2", '--engine-arguments={"decodeStepMs": 20}')


@pytest.fixture
def router(cluster: EmbeddedCluster) -> Iterator[router_pb2_grpc.RouterServiceStub]:
    with cluster.router() as stub:
        yield stub


def test_the_openai_client_gets_models_answers_and_errors(cluster: EmbeddedCluster) -> None:
    client = cluster.client()
    assert ["sim"] == [model.id for model in client.models.list()]
    answer = client.completions.create(model="sim", prompt="hello", max_tokens=8)
    assert (8, "length") == (answer.usage.completion_tokens, answer.choices[0].finish_reason)
    several = client.completions.create(model="sim", prompt=["hello", "you"], max_tokens=2, echo=True)
    for prompt, choice in zip(("hello", "you"), several.choices, strict=True):
        assert choice.text.startswith(prompt)
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("nothing")
    assert "model_not_found" == refused.value.code
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "hi"}], temperature=9)
    assert {"message", "type", "param", "code"} <= wrong.value.body.keys()


def test_the_anthropic_client_gets_answers_and_errors(cluster: EmbeddedCluster) -> None:
    client = cluster.anthropic_client()
    question = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    with client.messages.stream(**question) as stream:
        answer = stream.get_final_message()
    assert ("max_tokens", 8) == (answer.stop_reason, answer.usage.output_tokens)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**question | {"model": "nothing"})
    assert "not_found_error" == unknown.value.body["error"]["type"]
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(**question, extra_body={"temperature": 9})
    assert "temperature" in wrong.value.body["error"]["message"]
    with pytest.raises(anthropic.BadRequestError) as unsupported:
        client.messages.create(**question, tools=[{"name": "f", "input_schema": {"type": "object"}}])
    assert "tools" in unsupported.value.body["error"]["message"]


def test_grpc_clients_find_services_and_health(cluster: EmbeddedCluster) -> None:
    expected = {
        "router": "kvist.router.v1.RouterService",
        "controller": "kvist.controller.v1.ControllerService",
        "kvmaster": "kvist.kvmaster.v1.KvMasterService",
        "agent": "kvist.agent.v1.AgentService",
    }
    worker = next(iter(cluster.workers().values()))
    for address, service in [
        *((cluster.address(name), service) for name, service in expected.items()),
        (worker["address"], "kvist.engine.v1.EngineService"),
    ]:
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "readiness", service):
                answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
                assert health_pb2.HealthCheckResponse.SERVING == answer.status, (service, name)
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            listed = next(iter(reflection.ServerReflectionInfo(iter([request]), timeout=10)))
            assert service in {one.name for one in listed.list_services_response.service}


def test_wrong_arguments_are_named(router: router_pb2_grpc.RouterServiceStub) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        router.Tokenize(router_pb2.TokenizeRequest(model="sim"), timeout=10)
    assert grpc.StatusCode.INVALID_ARGUMENT is refused.value.code()
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in rpc_status.from_call(refused.value).details:
        detail.Unpack(info)
        detail.Unpack(request)
    assert ("INVALID_ARGUMENT", "kvist.dev") == (info.reason, info.domain)
    assert ["prompt"] == [violation.field for violation in request.field_violations]
    with pytest.raises(grpc.RpcError) as empty:
        router.Embed(router_pb2.EmbedRequest(model="sim"), timeout=10)
    assert grpc.StatusCode.INVALID_ARGUMENT is empty.value.code()


def test_tokens_survive_the_way_to_text_and_back(router: router_pb2_grpc.RouterServiceStub) -> None:
    request = router_pb2.TokenizeRequest(model="sim")
    request.prompt.text = "naïve 🌿 text"
    ids = router.Tokenize(request, timeout=10).token_ids
    answer = router.Detokenize(router_pb2.DetokenizeRequest(model="sim", token_ids=ids), timeout=10)
    assert "naïve 🌿 text" == answer.text


def test_commands_print_what_programs_can_read(cluster: EmbeddedCluster) -> None:
    status = cluster.json("status", "--json")
    assert (True, 2) == (status["healthy"], len(status["workers"]))
    assert {"READY"} == {worker["phase"] for worker in status["workers"]}
    assert ["sim"] == [item["metadata"]["name"] for item in cluster.json("get", "ms", "-o", "json")["items"]]
    assert 2 == len(cluster.kvist("get", "workers", "-o", "name").split())
    assert "name: router-0  # default" in cluster.kvist("config", "show", "router", "--set=controllers=127.0.0.1:1")
    for service in ("router", "controller", "kvmaster", "agent"):
        shown = cluster.kvist("config", "show", service)
        assert "  # flag telemetry.admin_listen" in shown
    assert "worker_uid: sim-" in cluster.kvist("config", "show", "worker")
    assert all(finding["well"] for finding in cluster.json("doctor", "--json")["findings"])
    cluster.kvist("get", "planets", code=2)
    cluster.kvist("get", "ms", "nothing", code=4)
    cluster.kvist("chat", "hello", "--endpoint=127.0.0.1:1", code=5)
    talk = cluster.kvist("chat", "hello", "--max-tokens=4")
    assert "4 generated" in talk


def test_the_routers_request_line_has_the_schema_of_pythons_logs(cluster: EmbeddedCluster) -> None:
    answer = cluster.client().completions.create(model="sim", prompt="hello", max_tokens=2)
    request_id = answer.id.removeprefix("cmpl-")
    log = cluster.home / "logs" / "router.log"

    def lines() -> list[dict[str, object]]:
        # Whole lines: the last one may be half written.
        return [json.loads(line) for line in log.read_text().rpartition("\n")[0].splitlines()]

    by_rust = eventually(
        "the line is written", lambda: next((line for line in lines() if line.get("request_id") == request_id), None)
    )
    by_python = next(line for line in lines() if line["event"] == "listening")
    output = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    try:
        settings = TelemetrySettings(log_format="json")
        telemetry.configure_logging(settings, service="kvist-router", instance="router-0", stream=output)
        telemetry.log_canonical_line(telemetry.logger("kvist.request"), outcome="length")
    finally:
        root.handlers, root.level = handlers, level
        structlog.reset_defaults()
    canonical = json.loads(output.getvalue())
    # What Python would write is in the line of Rust, under the same names and in the same forms.
    assert canonical.keys() <= by_rust.keys()
    for name in ("event", "level", "logger", "service", "instance", "outcome"):
        assert canonical[name] == by_rust[name]
    assert re.sub(r"\d", "0", canonical["timestamp"]) == re.sub(r"\d", "0", by_rust["timestamp"])
    # And both halves of the process call themselves alike.
    assert (by_python["service"], by_python["instance"]) == (by_rust["service"], by_rust["instance"])


def test_a_client_that_leaves_frees_the_engine(cluster: EmbeddedCluster) -> None:
    stream = cluster.client().chat.completions.create(
        model="sim", messages=[{"role": "user", "content": "go on"}], max_tokens=2000, stream=True
    )
    chunks = iter(stream)
    for _ in range(3):
        next(chunks)
    busy = cluster.busy_worker()
    stream.close()
    eventually("the reservation is returned", lambda: cluster.reservations() == 0, limit_seconds=5)
    idle = eventually(
        "the engine is idle", lambda: (load := cluster.targets()[busy].load).running_requests == 0 and load
    )
    steps = idle.engine_steps_total
    # The same counters a while later, a while in which the request would have made many steps.
    cluster.client().completions.create(model="sim", prompt="x", max_tokens=1)
    assert cluster.targets()[busy].load.generated_tokens_total - idle.generated_tokens_total <= 1
    assert cluster.targets()[busy].load.engine_steps_total - steps <= 2


def test_a_second_cluster_and_a_taken_port_are_refused_with_a_hint(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    assert "kvist down" in cluster.kvist("up", code=2)
    port = cluster.address("http").rpartition(":")[2]
    other = EmbeddedCluster(tmp_path / "other")
    refused = other.kvist("up", f"--http-port={port}", "--grpc-port=0", "--detach", code=8)
    assert "--http-port" in refused
    assert f"port {port} is in use" in refused
    assert "failed" == json.loads((other.home / "cluster.json").read_text())["phase"]
