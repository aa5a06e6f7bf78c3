"""Model services come, are scaled, are refused and go, on the simulated engine."""

from __future__ import annotations

from collections.abc import Callable

import anthropic
import openai
import pytest

from support.embedded import EmbeddedCluster, eventually


@pytest.fixture(scope="module")
def cluster(start: Callable[..., EmbeddedCluster]) -> EmbeddedCluster:
    return start("--engine=sim", "--workers=1")


def models(cluster: EmbeddedCluster) -> list[str]:
    return sorted(model.id for model in cluster.client().models.list())


def test_a_second_service_is_served_scaled_and_gone(cluster: EmbeddedCluster) -> None:
    assert "modelservice/second created" in cluster.apply("second", "--wait", replicas=3)
    assert ["second", "sim"] == models(cluster)
    assert 3 == sum(worker["phase"] == "READY" for worker in cluster.workers("second").values())
    eventually(
        "the router knows all three",
        lambda: 3 == sum(t.model == "second" and not t.excluded_reason for t in cluster.targets().values()),
    )
    answer = cluster.client().completions.create(model="second", prompt="hello", max_tokens=4)
    assert 4 == answer.usage.completion_tokens

    # A running request outlives the scaling: its worker is drained, whichever it is.
    slow = {"name": "sim", "arguments": {"decodeStepMs": 10}}
    cluster.apply("second", "--wait", replicas=3, engine=slow)
    streams = [
        iter(cluster.client().completions.create(model="second", prompt=f"{n}", max_tokens=300, stream=True))
        for n in range(6)
    ]
    for stream in streams:
        next(stream)
    assert "configured" in cluster.apply("second", replicas=1, engine=slow)
    assert {"length"} == {[chunk.choices[0].finish_reason for chunk in stream][-1] for stream in streams}
    cluster.apply("second", "--wait", replicas=1, engine=slow)
    assert 1 == len(cluster.workers("second"))
    assert "unchanged" in cluster.apply("second", replicas=1, engine=slow)

    assert "modelservice/second deleted" in cluster.kvist("delete", "ms", "second")
    assert ["sim"] == models(cluster)
    assert not cluster.workers("second")
    cluster.kvist("delete", "ms", "second", code=4)


def test_a_wrong_manifest_is_refused_with_paths_and_suggestions(cluster: EmbeddedCluster) -> None:
    refused = cluster.apply("wrong", code=2, replica=2, engine={"name": "simm"})
    assert "spec.replica: unknown field, did you mean 'replicas'?" in refused
    assert "spec.engine.name: must be one of attached, llamacpp, sim, vllm, did you mean 'sim'?" in refused
    assert "spec.replicas" in cluster.apply("wrong", code=2, replicas=-1)
    assert "spec.model: 'sim' is served by" in cluster.apply("other", code=2, model="sim")
    assert "metadata.nam: unknown field, did you mean 'name'?" in cluster.kvist(
        "apply", "-f", "-", code=2, stdin="apiVersion: kvist.dev/v1alpha1\nkind: ModelService\nmetadata: {nam: x}\n"
    )
    cluster.kvist("apply", "-f", "/nowhere.yaml", code=2)
    assert "dry run" in cluster.apply("checked", "--dry-run")
    assert ["sim"] == models(cluster)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"hashUnitTokens": 48}, "its block size of 16 tokens is no multiple of the pool's hash unit of 48 tokens"),
        ({"tokenizerDigest": "ab" * 32}, "is not the pool's (abababababab)"),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_with_the_reason(
    cluster: EmbeddedCluster, spec: dict[str, object], reason: str
) -> None:
    cluster.apply("misfit", **spec)
    shown = eventually("it is refused", lambda: "REFUSED" in (text := cluster.kvist("get", "workers")) and text)
    assert reason in shown
    assert reason in cluster.kvist("describe", "ms", "misfit")
    assert "no worker of this model" in cluster.kvist("chat", "hello", "--model=misfit", code=8)
    cluster.kvist("delete", "ms", "misfit")


def test_an_engine_that_cannot_start_says_why(cluster: EmbeddedCluster) -> None:
    cluster.apply("broken", engine={"name": "sim", "arguments": {"blockz": 3}})
    shown = eventually("it backs off", lambda: "BACKING_OFF" in (text := cluster.kvist("get", "workers")) and text)
    assert "broken" in shown
    cluster.kvist("delete", "ms", "broken")


def test_a_policy_counts_for_the_next_request_and_the_client_comes_back_when_it_is_told_to(
    cluster: EmbeddedCluster,
) -> None:
    slow = {"name": "sim", "arguments": {"decodeStepMs": 10}}
    cluster.apply("narrow", "--wait", engine=slow)
    shown = cluster.apply("narrow", code=2, engine=slow, routing={"picker": {"algorithm": "nosuch"}})
    assert 'spec.routing.picker.algorithm: unknown picker "nosuch"; valid: max, gamble_sampling' in shown
    one_at_a_time = {"concurrency": {"maxConcurrentRequests": 1}}
    policy = {"engine": slow, "routing": {"preset": "foretoken"}, "admission": one_at_a_time}
    before = set(cluster.workers("narrow"))
    assert "configured" in cluster.apply("narrow", **policy)
    eventually(
        "the router has the policy",
        lambda: "gamble_sampling" in cluster.kvist("route", "explain", "--prompt=x", "--model=narrow"),
    )
    assert before == set(cluster.workers("narrow")), "a policy restarts nobody"

    question = {"model": "narrow", "prompt": "hello", "max_tokens": 4}
    client = cluster.client()
    stream = iter(client.completions.create(**question | {"max_tokens": 150}, stream=True))
    next(stream)
    with pytest.raises(openai.RateLimitError) as refused:
        client.with_options(max_retries=0).completions.create(**question)
    assert "queue_full" == refused.value.code
    assert 1 <= int(refused.value.response.headers["retry-after"])
    # The first request takes a second and a half; the client waits as long as it is told to, each time.
    answer = client.with_options(max_retries=9).completions.with_raw_response.create(**question)
    assert 1 <= answer.retries_taken <= 4
    assert 4 == answer.parse().usage.completion_tokens
    assert "length" == [chunk.choices[0].finish_reason for chunk in stream if chunk.choices][-1]

    stream = iter(client.completions.create(**question | {"max_tokens": 150}, stream=True))
    next(stream)
    message = {"model": "narrow", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    other = cluster.anthropic_client()
    with pytest.raises(anthropic.RateLimitError) as limited:
        other.with_options(max_retries=0).messages.create(**message)
    assert 1 <= int(limited.value.response.headers["retry-after"])
    said = other.with_options(max_retries=9).messages.with_raw_response.create(**message)
    assert 1 <= said.retries_taken <= 4
    assert 4 == said.parse().usage.output_tokens
    assert "length" == [chunk.choices[0].finish_reason for chunk in stream if chunk.choices][-1]
    cluster.kvist("delete", "ms", "narrow")
