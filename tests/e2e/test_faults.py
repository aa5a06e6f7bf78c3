"""Processes that are killed under running requests, on the simulated engine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import openai
import pytest

from support.embedded import EmbeddedCluster, chosen_worker, eventually

# Slow enough that a fault always meets a running request; prefill is slow as well, so that it may meet one without a
# token yet.
ENGINE_ARGUMENTS = '{"decodeStepMs": 20, "prefillTokensPerSecond": 200}'


@pytest.fixture(scope="module")
def cluster(start: Callable[..., EmbeddedCluster]) -> EmbeddedCluster:
    return start("--engine=sim", "--workers=2", f"--engine-arguments={ENGINE_ARGUMENTS}")


def stream(cluster: EmbeddedCluster, text: str, *, max_tokens: int = 3000) -> openai.Stream:
    return cluster.client().chat.completions.create(
        model="sim", messages=[{"role": "user", "content": text}], max_tokens=max_tokens, stream=True
    )


def all_is_well(cluster: EmbeddedCluster) -> bool:
    return (
        all(worker["phase"] == "READY" for worker in cluster.workers().values())
        and cluster.kv_is_equal(2)
        and cluster.reservations() == 0
    )


def test_a_killed_worker_ends_its_stream_with_an_error_and_comes_back(cluster: EmbeddedCluster) -> None:
    chunks = iter(stream(cluster, "go on"))
    for _ in range(4):
        next(chunks)
    uid = cluster.busy_worker()
    before = cluster.workers()[uid]
    os.kill(before["process_id"], signal.SIGKILL)
    killed_at = time.monotonic()

    with pytest.raises(openai.APIError) as cut:
        for chunk in chunks:
            assert chunk.choices[0].finish_reason is None
    assert "engine_lost" == cut.value.code
    incarnation = int(before["incarnation"])
    eventually("its blocks are gone from both indices", lambda: incarnation not in cluster.known_incarnations())
    print(f"forgotten by both indices {time.monotonic() - killed_at:.3f} s after the kill")
    answer = cluster.client().completions.create(model="sim", prompt="the other serves on", max_tokens=2)
    assert uid != chosen_worker(cluster.decision(answer.id.removeprefix("cmpl-"))) or cluster.workers()[uid]["restarts"]
    eventually("the worker is back and all is known exactly", lambda: all_is_well(cluster))
    after = cluster.workers()[uid]
    assert int(after["incarnation"]) > int(before["incarnation"])
    assert after["restarts"] == before["restarts"] + 1


def test_a_request_without_a_token_is_served_by_the_other_worker(cluster: EmbeddedCluster) -> None:
    outcome: list[object] = []
    prompt = "a prompt that is prefilled for some seconds, and then answered. " * 10

    def ask() -> None:
        outcome.append(cluster.client().completions.create(model="sim", prompt=prompt, max_tokens=4))

    # Asked before, so that the kill comes long before the first token.
    process_ids = {uid: worker["process_id"] for uid, worker in cluster.workers().items()}
    asking = threading.Thread(target=ask)
    asking.start()
    uid = eventually(
        "a worker has the request", lambda: next((u for u, t in cluster.targets().items() if t.reservations), "")
    )
    os.kill(process_ids[uid], signal.SIGKILL)
    asking.join(60)
    assert [4] == [answer.usage.completion_tokens for answer in outcome]
    decision = cluster.decision(outcome[0].id.removeprefix("cmpl-"))
    assert 2 == decision.attempt
    assert uid != chosen_worker(decision)
    eventually("the worker is back and all is known exactly", lambda: all_is_well(cluster))


def test_workers_outlive_their_agent_and_are_attached_again(cluster: EmbeddedCluster) -> None:
    before = cluster.workers()
    chunks = iter(stream(cluster, "go on through it", max_tokens=200))
    next(chunks)
    agent = cluster.process_id("agent")
    cluster.kill("agent")
    assert "length" == [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1]
    eventually("the supervisor starts the agent again", lambda: cluster.process_id("agent") not in {0, agent})
    eventually("all is known exactly", lambda: all_is_well(cluster))
    after = cluster.workers()
    assert {uid: worker["process_id"] for uid, worker in before.items()} == {
        uid: worker["process_id"] for uid, worker in after.items()
    }
    assert {uid: worker["incarnation"] for uid, worker in before.items()} == {
        uid: worker["incarnation"] for uid, worker in after.items()
    }


@pytest.mark.parametrize("name", ["controller", "kvmaster"])
def test_requests_do_not_notice_a_killed_control_plane(cluster: EmbeddedCluster, name: str) -> None:
    process = cluster.process_id(name)
    chunks = iter(stream(cluster, f"go on without the {name}", max_tokens=100))
    next(chunks)
    cluster.kill(name)
    cluster.client().completions.create(model="sim", prompt=f"while the {name} is away", max_tokens=2)
    assert "length" == [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1]
    eventually("the supervisor starts it again", lambda: cluster.process_id(name) not in {0, process})
    eventually("all is known exactly", lambda: all_is_well(cluster))
