"""vLLM of two ranks behind the whole mesh: clients, routing by its caches, audits, and the death of an engine core."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import psutil
import pytest

from kvist.engine.v1 import engine_pb2, engine_pb2_grpc
from kvist.router.v1 import router_pb2
from support.embedded import EmbeddedCluster, eventually
from support.vllm_worker import BLOCK_SIZE_TOKENS, ENVIRONMENT, MODEL

pytestmark = pytest.mark.timeout(1200)

# Two engine cores that start at once share the machine's cores.
START_SECONDS = 900
LONG_PROMPT = "Here are the rules of the library. Books are lent for four weeks and must come back in time. " * 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, engine_arguments: dict[str, Any]) -> Iterator[EmbeddedCluster]:
    """The embedded cluster with a service on vLLM, which it did not begin with: its start takes longer."""
    cluster = EmbeddedCluster(tmp_path_factory.mktemp("mesh"))
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        cluster.up("--engine=sim", "--workers=1")
        cluster.apply(
            MODEL,
            model=MODEL,
            engine={"name": "vllm", "arguments": {**engine_arguments, "data-parallel-size": 2}},
            replicas=1,
            startupTimeout="15m",
        )
        eventually("the worker is ready", lambda: is_ready(cluster), limit_seconds=START_SECONDS)
        yield cluster
    finally:
        os.environ.clear()
        os.environ.update(before)
        cluster.down()


def is_ready(cluster: EmbeddedCluster) -> bool:
    phases = [worker["phase"] for worker in cluster.workers(MODEL).values()]
    time.sleep(0.5)
    return phases == ["READY"] and any(
        target.model == MODEL and not target.excluded_reason for target in cluster.targets().values()
    )


def client(cluster: EmbeddedCluster) -> openai.OpenAI:
    return cluster.client().with_options(timeout=300)


def ask(cluster: EmbeddedCluster, text: str, **more: Any) -> Any:
    return client(cluster).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], **{"max_tokens": 8, "temperature": 0, **more}
    )


def worker_stub(cluster: EmbeddedCluster) -> tuple[str, str]:
    [(uid, worker)] = cluster.workers(MODEL).items()
    return uid, worker["address"]


def audit_is_clean(cluster: EmbeddedCluster) -> bool:
    done = cluster.run("kv", "audit")
    return done.returncode == 0


def test_chat_and_completions_through_the_edge(cluster: EmbeddedCluster) -> None:
    whole = ask(cluster, "What is the capital of France?", max_tokens=16)
    assert "Paris" in whole.choices[0].message.content
    chunks = ask(cluster, "What is the capital of France?", max_tokens=16, stream=True)
    assert whole.choices[0].message.content == "".join(
        chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
    )
    completion = client(cluster).completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0
    )
    assert "Paris" in completion.choices[0].text


@pytest.mark.parametrize("rank", [1, 0])
def test_a_prompt_goes_to_the_rank_that_holds_it_and_is_explained(cluster: EmbeddedCluster, rank: int) -> None:
    text = f"{rank}: {LONG_PROMPT}"
    with cluster.router() as router:
        prompt = router.Tokenize(
            router_pb2.TokenizeRequest(model=MODEL, prompt=router_pb2.Prompt(text=text)), timeout=10
        ).token_ids
    uid, address = worker_stub(cluster)
    # Somebody else has asked for it, past the mesh.
    asked = engine_pb2.EngineRequest(
        tokens=engine_pb2.TokenIds(ids=prompt), rank=rank, stop=engine_pb2.StopConditions(max_tokens=1)
    )
    with grpc.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        assert list(stub.Generate(engine_pb2.GenerateRequest(request=asked), timeout=300))
    eventually("router, KV master and ledgers agree", lambda: audit_is_clean(cluster))
    answer = client(cluster).completions.create(model=MODEL, prompt=text, max_tokens=4, temperature=0)
    cached = answer.usage.prompt_tokens_details.cached_tokens
    blocks = (len(prompt) - 1) // BLOCK_SIZE_TOKENS
    assert cached == blocks * BLOCK_SIZE_TOKENS > 0
    request_id = answer.id.removeprefix("cmpl-")
    decision = cluster.decision(request_id)
    assert {candidate.rank for candidate in decision.candidates} == {0, 1}
    chosen = decision.candidates[decision.chosen_candidate]
    assert chosen.rank == rank
    assert [match.blocks for match in chosen.matches] == [blocks]
    explained = cluster.kvist("route", "explain", request_id)
    assert f"{cached} of {len(prompt)} tokens cached" in explained
    [line] = [line for line in explained.splitlines() if "→" in line]
    assert f" {uid}/{rank} " in line


def test_the_index_is_exact_while_blocks_are_evicted(cluster: EmbeddedCluster) -> None:
    for number in range(6):
        ask(cluster, f"{number}. {LONG_PROMPT}", max_tokens=1)
        eventually("the audit is clean", lambda: audit_is_clean(cluster))


def test_a_json_schema_is_obeyed(cluster: EmbeddedCluster) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = ask(
        cluster,
        "Name a capital.",
        max_tokens=24,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
    )
    assert json.loads(answer.choices[0].message.content)["city"] in {"Paris", "Rome"}


def test_a_reset_reaches_the_router_within_a_second(cluster: EmbeddedCluster) -> None:
    ask(cluster, LONG_PROMPT, max_tokens=1)
    uid, address = worker_stub(cluster)
    eventually("the router holds blocks", lambda: router_blocks(cluster, uid) > 0)
    with grpc.insecure_channel(address) as channel:
        engine_pb2_grpc.EngineServiceStub(channel).ResetCache(engine_pb2.ResetCacheRequest(), timeout=30)
    eventually("the router holds none", lambda: router_blocks(cluster, uid) == 0, limit_seconds=1)


def router_blocks(cluster: EmbeddedCluster, uid: str) -> int:
    with cluster.router() as router:
        sources = router.ListSources(router_pb2.ListSourcesRequest(), timeout=10).sources
    return sum(tier.block_count for source in sources if source.source.worker_uid == uid for tier in source.tiers)


def test_a_dead_engine_core_is_an_error_event_and_the_agent_starts_another(cluster: EmbeddedCluster) -> None:
    uid, _ = worker_stub(cluster)
    process_id = cluster.workers(MODEL)[uid]["process_id"]
    core, _ = [
        process
        for process in psutil.Process(process_id).children(recursive=True)
        if "EngineCore" in " ".join(process.cmdline())
    ]
    stream = client(cluster).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Tell a long story."}], max_tokens=300, stream=True
    )
    with pytest.raises(openai.APIError) as failed:
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                # Gone already where a further piece was under way.
                with contextlib.suppress(psutil.NoSuchProcess):
                    core.kill()
    assert "finish_reason" not in str(failed.value)
    eventually("the worker is another process", lambda: is_another(cluster, uid, process_id), limit_seconds=60)
    eventually("it serves again", lambda: is_ready(cluster), limit_seconds=START_SECONDS)
    assert ask(cluster, "Hello.", max_tokens=2).choices[0].finish_reason == "length"


def is_another(cluster: EmbeddedCluster, uid: str, process_id: int) -> bool:
    time.sleep(0.2)
    return cluster.workers(MODEL)[uid].get("process_id", process_id) not in {0, process_id}
