"""Two vLLM engines that divide requests: the prompt's KV goes through a folder that both see."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import openai
import psutil
import pytest

from kvist.engine.v1 import engine_pb2, engine_pb2_grpc
from kvist.router.v1 import router_pb2
from support.embedded import EmbeddedCluster, eventually
from support.vllm_worker import BLOCK_SIZE_TOKENS, ENVIRONMENT

pytestmark = pytest.mark.timeout(2400)

MODEL = "pair"
# Two engines that start at once share the machine's cores.
START_SECONDS = 1200
FROM_TOKENS = 64
TEXT = "The library lends books for four weeks. Late books cost ten cents a day, and lost ones their price. " * 6


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, engine_arguments: dict[str, Any], shared_folder: Path
) -> Iterator[EmbeddedCluster]:
    """The embedded cluster with a prefill and a decode worker on vLLM."""
    cluster = EmbeddedCluster(tmp_path_factory.mktemp("pair"))
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        cluster.up("--engine=sim", "--workers=1")
        cluster.apply(
            MODEL,
            model=MODEL,
            engine={"name": "vllm", "arguments": engine_arguments},
            pools=[{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}],
            kvTransfer={
                "connector": "ExampleConnector",
                "sharedFolder": str(shared_folder),
                "prefillFromTokens": FROM_TOKENS,
            },
            startupTimeout="20m",
        )
        eventually("both are ready", lambda: is_ready(cluster), limit_seconds=START_SECONDS)
        yield cluster
    finally:
        os.environ.clear()
        os.environ.update(before)
        print(cluster.logs())
        cluster.down()


def is_ready(cluster: EmbeddedCluster) -> bool:
    time.sleep(0.5)
    targets = [target for target in cluster.targets().values() if target.model == MODEL]
    return len(targets) == 2 and not any(target.excluded_reason for target in targets)


def client(cluster: EmbeddedCluster) -> openai.OpenAI:
    return cluster.client().with_options(timeout=600)


def ask(cluster: EmbeddedCluster, text: str, **more: Any) -> Any:
    return client(cluster).completions.create(model=MODEL, prompt=text, **{"max_tokens": 12, "temperature": 0, **more})


def rounds(cluster: EmbeddedCluster, answer: Any) -> list[tuple[str, str]]:
    request_id = answer.id.removeprefix("cmpl-")
    cluster.decision(request_id)
    with cluster.router() as router:
        explained = router.Explain(router_pb2.ExplainRequest(request_id=request_id), timeout=10).decisions
    return [(decision.round, decision.outcome) for decision in explained]


@contextmanager
def engine(cluster: EmbeddedCluster, role: str) -> Iterator[engine_pb2_grpc.EngineServiceStub]:
    """The worker of a role, past all routers."""
    [address] = [worker["address"] for worker in cluster.workers(MODEL).values() if worker["role"] == role]
    with grpc.insecure_channel(address) as channel:
        yield engine_pb2_grpc.EngineServiceStub(channel)


def load_of(cluster: EmbeddedCluster, role: str) -> Any:
    [target] = [cluster.targets()[uid] for uid, worker in cluster.workers(MODEL).items() if worker["role"] == role]
    return target.load


def is_idle(cluster: EmbeddedCluster) -> bool:
    loads = [load_of(cluster, role) for role in ("prefill", "decode")]
    return cluster.reservations() == 0 and all(
        (load.running_requests, load.waiting_requests, load.pinned_blocks) == (0, 0, 0) for load in loads
    )


def test_a_pair_answers_as_one_engine_does_with_kv_from_outside(cluster: EmbeddedCluster, shared_folder: Path) -> None:
    divided = ask(cluster, TEXT)
    assert rounds(cluster, divided) == [("prefill", "handed_over"), ("decode", "length")]
    assert any(shared_folder.iterdir())
    whole_blocks = (divided.usage.prompt_tokens - 1) // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS
    eventually(
        "the decode engine has counted what came",
        lambda: load_of(cluster, "decode").external_tokens_total == whole_blocks,
    )
    assert load_of(cluster, "prefill").external_tokens_total == 0
    # The same text by an engine alone: the decode worker's cache has the prompt now, so nothing is divided.
    alone = ask(cluster, TEXT)
    assert rounds(cluster, alone) == [("", "length")]
    assert alone.choices[0].text == divided.choices[0].text
    assert alone.usage.prompt_tokens_details.cached_tokens == whole_blocks
    short = ask(cluster, "The capital of France is", max_tokens=4)
    assert rounds(cluster, short) == [("", "length")]
    assert "Paris" in short.choices[0].text


def test_an_engine_that_was_sent_nothing_draws_the_same_tokens(cluster: EmbeddedCluster, shared_folder: Path) -> None:
    text = f"Once more, from the beginning. {TEXT}"
    divided = ask(cluster, text)
    assert rounds(cluster, divided)[0] == ("prefill", "handed_over")
    # Neither the cache nor the folder has it now.
    with engine(cluster, "decode") as decode:
        decode.ResetCache(engine_pb2.ResetCacheRequest(), timeout=60)
    for folder in shared_folder.iterdir():
        shutil.rmtree(folder)
    external = load_of(cluster, "decode").external_tokens_total
    prompt = router_pb2.Prompt(text=text)
    with cluster.router() as router:
        tokens = router.Tokenize(router_pb2.TokenizeRequest(model=MODEL, prompt=prompt), timeout=30).token_ids
    request = engine_pb2.EngineRequest(
        tokens=engine_pb2.TokenIds(ids=tokens),
        sampling=engine_pb2.SamplingParameters(temperature=0),
        stop=engine_pb2.StopConditions(max_tokens=12),
    )
    drawn: list[int] = []
    with engine(cluster, "decode") as decode:
        for response in decode.Generate(engine_pb2.GenerateRequest(request=request), timeout=600):
            drawn += response.delta.token_ids
            cached = response.finished.receipt.cached_tokens
    with cluster.router() as router:
        words = router.Detokenize(router_pb2.DetokenizeRequest(model=MODEL, token_ids=drawn), timeout=30).text
    assert (words, cached) == (divided.choices[0].text, 0)
    assert load_of(cluster, "decode").external_tokens_total == external


def test_a_client_that_leaves_leaves_nothing_behind(cluster: EmbeddedCluster) -> None:
    for number in range(3):
        stream = ask(cluster, f"{number}. {TEXT}", max_tokens=200, stream=True)
        if number:
            next(iter(stream))
        stream.close()
        eventually("nothing runs", lambda: is_idle(cluster), limit_seconds=120)


def test_a_decode_engine_that_dies_is_one_error_and_the_mesh_recovers(cluster: EmbeddedCluster) -> None:
    uid, worker = next(item for item in cluster.workers(MODEL).items() if item[1]["role"] == "decode")
    [core] = [
        process
        for process in psutil.Process(worker["process_id"]).children(recursive=True)
        if "EngineCore" in " ".join(process.cmdline())
    ]
    stream = ask(cluster, f"A story. {TEXT}", max_tokens=200, stream=True)
    with pytest.raises(openai.APIError):
        for number, _ in enumerate(stream):
            if number == 0:
                core.kill()
    eventually("nothing is promised", lambda: cluster.reservations() == 0, limit_seconds=60)
    eventually("both are ready again", lambda: is_ready(cluster), limit_seconds=START_SECONDS)
    assert uid in cluster.workers(MODEL)
    again = ask(cluster, f"Another one. {TEXT}", max_tokens=4)
    assert rounds(cluster, again)[-1] == ("decode", "length")
