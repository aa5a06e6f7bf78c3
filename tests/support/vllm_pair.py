"""A prefill and a decode worker on vLLM in the embedded cluster, as tests see them."""

from __future__ import annotations

import os
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

MODEL = "pair"
# Two engines that start at once share the machine's cores.
START_SECONDS = 1200
FROM_TOKENS = 64
TEXT = "The library lends books for four weeks. Late books cost ten cents a day, and lost ones their price. " * 6


@contextmanager
def running_pair(home: Path, engine_arguments: dict[str, Any], transfer: dict[str, Any]) -> Iterator[EmbeddedCluster]:
    """The cluster, once both workers take requests."""
    cluster = EmbeddedCluster(home)
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        cluster.up("--engine=sim", "--workers=1")
        cluster.apply(
            MODEL,
            model=MODEL,
            engine={"name": "vllm", "arguments": engine_arguments},
            pools=[{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}],
            kvTransfer={"prefillFromTokens": FROM_TOKENS, **transfer},
            startupTimeout="20m",
        )
        eventually("both are ready", lambda: is_ready(cluster), limit_seconds=START_SECONDS)
        yield cluster
    finally:
        os.environ.clear()
        os.environ.update(before)
        # Shown by pytest where a test has failed.
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


def prompt_tokens(cluster: EmbeddedCluster, text: str) -> list[int]:
    prompt = router_pb2.Prompt(text=text)
    with cluster.router() as router:
        return list(router.Tokenize(router_pb2.TokenizeRequest(model=MODEL, prompt=prompt), timeout=30).token_ids)


def alone(cluster: EmbeddedCluster, text: str, *, max_tokens: int) -> tuple[str, int]:
    """What the decode engine draws when nobody has computed anything for it, and the cached tokens that it says."""
    request = engine_pb2.EngineRequest(
        tokens=engine_pb2.TokenIds(ids=prompt_tokens(cluster, text)),
        sampling=engine_pb2.SamplingParameters(temperature=0),
        stop=engine_pb2.StopConditions(max_tokens=max_tokens),
    )
    drawn: list[int] = []
    cached = 0
    with engine(cluster, "decode") as decode:
        decode.ResetCache(engine_pb2.ResetCacheRequest(), timeout=60)
        for response in decode.Generate(engine_pb2.GenerateRequest(request=request), timeout=600):
            drawn += response.delta.token_ids
            cached = response.finished.receipt.cached_tokens
    with cluster.router() as router:
        request_text = router_pb2.DetokenizeRequest(model=MODEL, token_ids=drawn)
        return router.Detokenize(request_text, timeout=30).text, cached


def process_ids_of(cluster: EmbeddedCluster, role: str) -> set[int]:
    """The processes of the workers of a role."""
    return {worker["process_id"] for worker in cluster.workers(MODEL).values() if worker["role"] == role}


def process_of(cluster: EmbeddedCluster, role: str) -> psutil.Process:
    """The engine core of the worker of a role."""
    [worker] = [worker for worker in cluster.workers(MODEL).values() if worker["role"] == role]
    [core] = [
        process
        for process in psutil.Process(worker["process_id"]).children(recursive=True)
        if "EngineCore" in " ".join(process.cmdline())
    ]
    return core


def whole_blocks(answer: Any) -> int:
    """Tokens of a prompt's blocks that a cache can serve."""
    return (answer.usage.prompt_tokens - 1) // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS


def check_that_leaving_clients_leave_nothing(cluster: EmbeddedCluster) -> None:
    for number in range(3):
        stream = ask(cluster, f"{number}. {TEXT}", max_tokens=200, stream=True)
        if number:
            next(iter(stream))
        stream.close()
        eventually("nothing runs", lambda: is_idle(cluster), limit_seconds=120)


def check_that_a_dead_decode_engine_is_one_error(cluster: EmbeddedCluster) -> None:
    """And that the mesh recovers from it."""
    core = process_of(cluster, "decode")
    dead = process_ids_of(cluster, "decode")
    stream = ask(cluster, f"A story. {TEXT}", max_tokens=200, stream=True)
    with pytest.raises(openai.APIError):
        for number, _ in enumerate(stream):
            if number == 0:
                core.kill()
    eventually("nothing is promised", lambda: cluster.reservations() == 0, limit_seconds=60)
    # The old one may be listed as ready until its death has been noticed.
    eventually("another one is there", lambda: dead.isdisjoint(process_ids_of(cluster, "decode")), limit_seconds=120)
    eventually("both are ready again", lambda: is_ready(cluster), limit_seconds=START_SECONDS)
    again = ask(cluster, f"Another one. {TEXT}", max_tokens=4)
    assert rounds(cluster, again)[-1] == ("decode", "length")
