"""Parts that are taken away and brought back while eight simulated workers serve without a pause."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.embedded import EmbeddedCluster, eventually

WORKERS = 8
CLIENTS = 6


@dataclass
class Load:
    """What came of the requests of a load."""

    answered: int = 0
    failures: list[openai.APIError] = field(default_factory=list)


@contextmanager
def load(cluster: EmbeddedCluster) -> Iterator[Load]:
    """Asks for completions with several clients until the block ends."""
    outcome, stop = Load(), threading.Event()

    def ask(number: int) -> None:
        with cluster.client() as client:
            for turn in range(1_000_000):
                if stop.is_set():
                    return
                prompt = f"client {number} speaks of topic {turn % 9} " * 20
                try:
                    answer = client.completions.create(model="sim", prompt=prompt, max_tokens=8)
                except openai.APIError as failure:
                    outcome.failures.append(failure)
                    continue
                assert 8 == answer.usage.completion_tokens
                outcome.answered += 1

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        eventually("the load runs", lambda: outcome.answered > 20)
        yield outcome
        answered = outcome.answered
        eventually("the load still runs", lambda: outcome.answered > answered + 20)
    finally:
        stop.set()
        for client in clients:
            client.join(60)


@pytest.fixture(scope="module")
def cluster(start: Callable[..., EmbeddedCluster]) -> EmbeddedCluster:
    return start("--engine=sim", f"--workers={WORKERS}", '--engine-arguments={"decodeStepMs": 10}')


def is_up_again(cluster: EmbeddedCluster, name: str, before: int) -> bool:
    return cluster.process_id(name) not in {0, before}


def awareness(cluster: EmbeddedCluster) -> tuple[bool, str]:
    [known] = [model["kv_awareness"] for model in cluster.json("status", "--json")["models"]]
    return known["aware"], known["reason"]


def health(cluster: EmbeddedCluster, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
    with grpc.insecure_channel(cluster.address("router")) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=10).status


def metric(cluster: EmbeddedCluster, name: str) -> float:
    url = f"http://{cluster.address('router_admin')}/metrics"
    lines = urllib.request.urlopen(url, timeout=10).read().decode().splitlines()
    [value] = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"{name} ")]
    return float(value)


def test_nats_may_stop_and_start(cluster: EmbeddedCluster) -> None:
    before = cluster.process_id("nats")
    with load(cluster) as outcome:
        # Frozen first, so that everybody notices; then killed, and started again by the supervisor.
        os.kill(before, signal.SIGSTOP)
        answered = outcome.answered
        eventually("requests go on without NATS", lambda: outcome.answered > answered + 50)
        # Knowledge that is lost alarms, and takes nobody out of service.
        eventually(
            "the router says that it knows too little", lambda: awareness(cluster) == (False, "few_exact_sources")
        )
        assert health(cluster, "kvist.kv_awareness/sim") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert health(cluster, "") == health_pb2.HealthCheckResponse.SERVING
        assert 0 == metric(cluster, 'kvist_kv_aware{model="sim"}')
        assert cluster.json("status", "--json")["healthy"]
        assert "0 of 8 workers' caches are known exactly" in " ".join(cluster.kvist("status").split())
        answered = outcome.answered
        eventually("requests still go on", lambda: outcome.answered > answered + 20)
        cluster.kill("nats")
        eventually("NATS is back", lambda: is_up_again(cluster, "nats", before))
    assert [] == outcome.failures
    ended_at = time.monotonic()
    eventually("all is known exactly", lambda: cluster.kv_is_equal(WORKERS))
    eventually("the router says that it knows", lambda: awareness(cluster) == (True, ""))
    assert health(cluster, "kvist.kv_awareness/sim") == health_pb2.HealthCheckResponse.SERVING
    assert 1 == metric(cluster, 'kvist_kv_aware{model="sim"}')
    assert WORKERS == cluster.kvist("kv", "audit").count(" EQUAL at batch ")
    print(f"all exact {time.monotonic() - ended_at:.1f} s after the load's end; {outcome.answered} answered")


def test_the_agent_may_be_killed(cluster: EmbeddedCluster) -> None:
    before = cluster.process_id("agent")
    workers = {uid: worker["process_id"] for uid, worker in cluster.workers().items()}
    with load(cluster) as outcome:
        cluster.kill("agent")
        eventually("the agent is back", lambda: is_up_again(cluster, "agent", before))
        eventually("its workers are ready", lambda: all(w["phase"] == "READY" for w in cluster.workers().values()))
    assert [] == outcome.failures
    eventually("all is known exactly", lambda: cluster.kv_is_equal(WORKERS))
    assert workers == {uid: worker["process_id"] for uid, worker in cluster.workers().items()}


def test_the_router_may_be_killed(cluster: EmbeddedCluster) -> None:
    before = cluster.process_id("router")
    with load(cluster) as outcome:
        cluster.kill("router")
        eventually("the router is back", lambda: is_up_again(cluster, "router", before))
        eventually("it serves", lambda: cluster.json("status", "--json")["healthy"])
        failures = len(outcome.failures)
        answered = outcome.answered
        eventually("requests go on", lambda: outcome.answered > answered + 20)
        # Those that ran in the killed process, and those that found nobody until it was back; none after that.
        assert failures == len(outcome.failures)
    # Its index came from the KV master, not from eight workers.
    assert metric(cluster, "kvist_index_bootstrapped_sources_total") >= WORKERS
    assert {openai.APIConnectionError} >= {type(failure) for failure in outcome.failures}
    eventually("all is known exactly", lambda: cluster.kv_is_equal(WORKERS))
