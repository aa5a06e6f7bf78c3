"""A vLLM server that Kvist did not start, behind the whole mesh: official clients, routing by its cache, its death."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from support.embedded import EmbeddedCluster, eventually
from support.stock_process import StockProcess

MODEL = "attached"
BLOCK_SIZE = 16
PROMPT = "Here are the rules of the library. " * 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockProcess]:
    server = StockProcess(tmp_path_factory.mktemp("server"))
    server.start("--ranks=2")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def cluster(start: Callable[..., EmbeddedCluster], server: StockProcess) -> EmbeddedCluster:
    cluster = start("--engine=sim", "--workers=1")
    arguments = {**server.arguments, "dead-after-seconds": 2}
    cluster.apply(MODEL, engine={"name": "attached", "arguments": arguments})
    eventually("the server is a target", lambda: is_target(cluster))
    return cluster


def is_target(cluster: EmbeddedCluster) -> bool:
    targets = [target for target in cluster.targets().values() if target.model == MODEL]
    return bool(targets) and not any(target.excluded_reason for target in targets)


def worker(cluster: EmbeddedCluster) -> dict[str, Any]:
    [worker] = cluster.workers(MODEL).values()
    return worker


def ask(cluster: EmbeddedCluster, text: str, **more: Any) -> Any:
    return cluster.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], **{"max_tokens": 8, **more}
    )


def test_official_clients_are_answered(cluster: EmbeddedCluster) -> None:
    # The server repeats the end of the prompt, backwards.
    assert ask(cluster, "What is it?").choices[0].message.content == "\ntnatsis"
    chunks = list(ask(cluster, "What is it?", stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "\ntnatsis"
    assert chunks[-1].usage.completion_tokens == 8
    completion = cluster.client().completions.create(model=MODEL, prompt="abcdef", max_tokens=3)
    assert completion.choices[0].text == "fed"
    assert completion.choices[0].finish_reason == "length"


def test_a_prompt_asked_again_goes_to_the_rank_that_holds_it(cluster: EmbeddedCluster) -> None:
    first = ask(cluster, PROMPT)
    blocks = (first.usage.prompt_tokens - 1) // BLOCK_SIZE
    before = cluster.decision(first.id.removeprefix("chatcmpl-"))
    rank = before.candidates[before.chosen_candidate].rank
    eventually("router, KV master and ledgers agree", lambda: cluster.run("kv", "audit").returncode == 0)
    for _ in range(3):
        again = ask(cluster, PROMPT)
        assert again.usage.prompt_tokens_details.cached_tokens == blocks * BLOCK_SIZE > 0
        decision = cluster.decision(again.id.removeprefix("chatcmpl-"))
        chosen = decision.candidates[decision.chosen_candidate]
        assert chosen.rank == rank
        assert [match.blocks for match in chosen.matches] == [blocks]
        assert decision.receipt.cached_tokens == blocks * BLOCK_SIZE
    explained = cluster.kvist("route", "explain", again.id.removeprefix("chatcmpl-"))
    assert f"{blocks * BLOCK_SIZE} of {again.usage.prompt_tokens} tokens cached" in explained
    assert cluster.run("kv", "audit").returncode == 0


def test_what_the_server_cannot_do_is_refused_by_name(cluster: EmbeddedCluster, server: StockProcess) -> None:
    asked = len(server.log()["seen"])
    with pytest.raises(openai.BadRequestError) as refused:
        ask(cluster, "Quick!", extra_body={"priority": 1})
    assert refused.value.code == "unsupported_parameter"
    assert "priority" in refused.value.message
    assert len(server.log()["seen"]) == asked


def test_a_client_that_leaves_ends_its_request_at_the_server(cluster: EmbeddedCluster, server: StockProcess) -> None:
    server.script(step_seconds=0.05)
    aborted = server.log()["aborted"]
    stream = ask(cluster, "Tell me everything.", max_tokens=2_000, stream=True)
    next(iter(stream))
    stream.close()
    eventually("the server stopped", lambda: server.log()["aborted"] == aborted + 1 and not server.log()["running"])
    eventually("nothing is reserved", lambda: cluster.reservations() == 0)
    server.script()


def test_a_busy_server_is_overload(cluster: EmbeddedCluster, server: StockProcess) -> None:
    server.script("429")
    with pytest.raises(openai.RateLimitError) as refused:
        ask(cluster, "Hello?")
    assert refused.value.response.headers["retry-after"] == "3"
    server.script()


def test_the_server_dies_and_comes_back(cluster: EmbeddedCluster, server: StockProcess) -> None:
    incarnation = worker(cluster)["incarnation"]
    server.script("die")
    with pytest.raises(openai.APIError):
        for _ in ask(cluster, "Are you well?", stream=True):
            pass
    eventually("the worker says why it cannot start", lambda: "cannot be reached" in worker(cluster)["message"])
    server.start("--ranks=2")
    eventually("it serves again", lambda: is_target(cluster) and worker(cluster)["incarnation"] != incarnation)
    assert ask(cluster, "Are you well?").choices[0].finish_reason == "length"


def test_a_server_that_does_not_fit_is_refused_with_the_reason(cluster: EmbeddedCluster, server: StockProcess) -> None:
    arguments = {**server.arguments, "block-size": 32}
    cluster.apply("misfit", engine={"name": "attached", "arguments": arguments})

    def reason() -> str:
        return " ".join(str(worker["message"]) for worker in cluster.workers("misfit").values())

    eventually("the reason is shown", lambda: "block-size: is 16 at the server and 32 here" in reason())
    cluster.kvist("delete", "ms", "misfit", "--no-wait")
