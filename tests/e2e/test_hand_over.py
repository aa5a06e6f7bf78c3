"""Prefill and decode workers as processes: a service of two pools, and what happens when one of them is away."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kvist.router.v1 import router_pb2
from support.embedded import EmbeddedCluster, chosen_worker, eventually

pytestmark = pytest.mark.timeout(600)

MODEL = "pair"
POOLS = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]
TRANSFER = {"connector": "sim", "protocol": "tcp", "prefillFromTokens": 64}
ARGUMENTS = {"decodeStepMs": 2, "textTokens": 8}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """The embedded cluster with a pair beside the model that it began with."""
    cluster = EmbeddedCluster(tmp_path_factory.mktemp("pair"))
    try:
        cluster.up("--engine=sim", "--workers=1")
        apply(cluster)
        yield cluster
    finally:
        cluster.down()


def apply(cluster: EmbeddedCluster, **changes: Any) -> str:
    spec = {"engine": {"name": "sim", "arguments": ARGUMENTS}, "pools": POOLS, "kvTransfer": TRANSFER} | changes
    said = cluster.apply(MODEL, "--wait", model=MODEL, **spec)
    eventually("the router has both", lambda: len(ready(cluster)) >= 2)
    return said


def ready(cluster: EmbeddedCluster) -> dict[str, router_pb2.TargetStatus]:
    """Targets of the pair that take requests."""
    return {
        uid: target for uid, target in cluster.targets().items() if target.model == MODEL and not target.excluded_reason
    }


def worker_of(cluster: EmbeddedCluster, role: str) -> tuple[str, dict[str, Any]]:
    [found] = [item for item in cluster.workers(MODEL).items() if item[1]["role"] == role]
    return found


def ask(cluster: EmbeddedCluster, **more: Any) -> Any:
    """A prompt that nobody has seen, of more than 64 tokens."""
    text = f"{uuid.uuid4()} " + "and then some more of it " * 20
    return cluster.client().completions.create(model=MODEL, prompt=text, **{"max_tokens": 6, **more})


def rounds(cluster: EmbeddedCluster, answer: Any) -> list[tuple[str, str]]:
    """Part of the request and how it ended, of each of its decisions."""
    request_id = answer.id.removeprefix("cmpl-")
    cluster.decision(request_id)
    with cluster.router() as router:
        explained = router.Explain(router_pb2.ExplainRequest(request_id=request_id), timeout=10).decisions
    return [(decision.round, decision.outcome) for decision in explained]


def pinned_blocks(cluster: EmbeddedCluster) -> int:
    return sum(target.load.pinned_blocks for target in cluster.targets().values())


def is_clean(cluster: EmbeddedCluster) -> bool:
    return pinned_blocks(cluster) == 0 and cluster.reservations() == 0


def test_a_service_of_two_pools_shows_them_and_divides_requests(cluster: EmbeddedCluster) -> None:
    listed = cluster.kvist("get", "workers")
    assert "prefill" in listed
    assert "decode" in listed
    described = cluster.kvist("describe", "ms", MODEL)
    assert "(p 1/1, d 1/1)" in described
    answer = ask(cluster)
    assert answer.choices[0].finish_reason == "length"
    assert rounds(cluster, answer) == [("prefill", "handed_over"), ("decode", "length")]
    explained = cluster.kvist("route", "explain", answer.id.removeprefix("cmpl-"))
    assert "prefill of a divided request" in explained
    assert "decode of a divided request" in explained
    assert chosen_worker(cluster.decision(answer.id.removeprefix("cmpl-"))) == worker_of(cluster, "decode")[0]
    eventually("nothing is kept", lambda: is_clean(cluster))
    uid, worker = worker_of(cluster, "decode")
    described = cluster.kvist("describe", "worker", uid)
    assert "kvLayout" in described
    assert "connector: sim" in described
    assert worker["role"] == "decode"


def test_half_a_pair_is_refused_with_the_path_of_the_field(cluster: EmbeddedCluster) -> None:
    said = cluster.apply("half", code=2, model="half", pools=POOLS[:1], kvTransfer=TRANSFER)
    assert "spec.pools: incomplete P/D" in said


def test_a_prefill_worker_that_is_killed_costs_nobody_an_answer(cluster: EmbeddedCluster) -> None:
    uid, worker = worker_of(cluster, "prefill")
    os.kill(worker["process_id"], signal.SIGKILL)
    # Whether the router knows of it or not: the decode worker does it all.
    for _ in range(3):
        assert ask(cluster).choices[0].finish_reason == "length"
    eventually("another one is started", lambda: uid in ready(cluster))
    eventually("requests are divided again", lambda: rounds(cluster, ask(cluster))[0] == ("prefill", "handed_over"))
    eventually("nothing is kept", lambda: is_clean(cluster))


def test_a_prefill_worker_that_says_nothing_more_hangs_nobody(cluster: EmbeddedCluster) -> None:
    _, worker = worker_of(cluster, "prefill")
    os.kill(worker["process_id"], signal.SIGSTOP)
    try:
        answer = ask(cluster)
    finally:
        os.kill(worker["process_id"], signal.SIGCONT)
    assert answer.choices[0].finish_reason == "length"
    assert rounds(cluster, answer)[-1][1] == "length"
    eventually("it takes requests again", lambda: len(ready(cluster)) == 2)
    eventually("nothing is kept", lambda: is_clean(cluster))


def test_a_decode_worker_that_is_killed_ends_a_stream_with_one_error_and_no_block_stays_kept(
    cluster: EmbeddedCluster,
) -> None:
    uid, worker = worker_of(cluster, "decode")
    stream = ask(cluster, max_tokens=5_000, stream=True)
    with pytest.raises(openai.APIError) as failed:
        for number, _ in enumerate(stream):
            if number == 0:
                os.kill(worker["process_id"], signal.SIGKILL)
    assert "lost" in str(failed.value)
    eventually("nothing is kept", lambda: is_clean(cluster))
    eventually("another one is started", lambda: uid in ready(cluster))
    assert ask(cluster).choices[0].finish_reason == "length"


def test_a_client_that_leaves_frees_what_was_kept(cluster: EmbeddedCluster) -> None:
    for _ in range(5):
        stream = ask(cluster, max_tokens=5_000, stream=True)
        stream.close()
    eventually("nothing is kept", lambda: is_clean(cluster))


def test_a_transfer_that_fails_is_computed_again_or_fails_by_policy(cluster: EmbeddedCluster) -> None:
    pools = [{**POOLS[0], "engineArgs": {**ARGUMENTS, "transferFault": "wrong_blocks"}}, POOLS[1]]
    apply(cluster, pools=pools)
    assert rounds(cluster, ask(cluster))[-1] == ("decode", "length")
    eventually("what was refused is freed when its lease is over", lambda: is_clean(cluster))
    apply(cluster, pools=pools, kvTransfer={**TRANSFER, "onFailure": "fail", "lease": "1s"})
    eventually("the old workers are gone", lambda: len(cluster.workers(MODEL)) == 2)
    with pytest.raises(openai.APIStatusError) as failed:
        ask(cluster)
    assert (failed.value.status_code, failed.value.code) == (503, "kv_transfer_failed")
    eventually("nothing is kept", lambda: is_clean(cluster))


def test_a_pair_becomes_one_pool_and_back_without_a_gap(cluster: EmbeddedCluster) -> None:
    spec = {"engine": {"name": "sim", "arguments": ARGUMENTS}}
    cluster.apply(MODEL, "--wait", model=MODEL, **spec, replicas=1)
    eventually("one is left", lambda: [one["role"] for one in cluster.workers(MODEL).values()] == ["aggregate"])
    answer = eventually("it answers", lambda: ask(cluster))
    assert rounds(cluster, answer) == [("", "length")]
