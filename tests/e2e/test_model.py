"""A real model behind the whole mesh: what it answers, what it remembers, and whether the mesh knows."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvist.events.v1.events_pb2 import SOURCE_STATE_EXACT
from kvist.router.v1 import router_pb2
from support.embedded import EmbeddedCluster, chosen_worker, eventually

# Two engines that compute share the machine with whatever else it does.
pytestmark = pytest.mark.timeout(300)
MODEL = "smollm2-135m"
QUESTION = "Tell me, what is the capital of France?"
LONG_PROMPT = "Here are the rules of the library. Books are lent for four weeks and must come back in time. " * 8
RANDOM_PROMPTS = 200


@pytest.fixture(scope="module")
def cluster(start: Callable[..., EmbeddedCluster]) -> EmbeddedCluster:
    return start("--workers=2")


def ask(cluster: EmbeddedCluster, text: str, **more: object) -> object:
    return cluster.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], **{"max_tokens": 32, "temperature": 0, **more}
    )


def test_the_capital_of_france_whole_and_streamed(cluster: EmbeddedCluster) -> None:
    whole = ask(cluster, QUESTION)
    assert "Paris" in whole.choices[0].message.content
    assert "stop" == whole.choices[0].finish_reason
    chunks = list(ask(cluster, QUESTION, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    # The same text twice at temperature 0, whichever way it comes.
    assert whole.choices[0].message.content == streamed
    request = router_pb2.TokenizeRequest(model=MODEL)
    request.prompt.chat.messages.add(role="user", content=QUESTION)
    with cluster.router() as router:
        prompt_tokens = len(router.Tokenize(request, timeout=10).token_ids)
        answer_tokens = len(
            router.Tokenize(
                router_pb2.TokenizeRequest(model=MODEL, prompt=router_pb2.Prompt(text=streamed)), timeout=10
            ).token_ids
        )
    for usage in (whole.usage, chunks[-1].usage):
        # The end-of-turn token is counted and not shown.
        assert (prompt_tokens, answer_tokens + 1) == (usage.prompt_tokens, usage.completion_tokens)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_all_apis_tell_the_same(cluster: EmbeddedCluster) -> None:
    by_openai = ask(cluster, QUESTION)
    responses = cluster.client().responses
    asked = {"model": MODEL, "input": QUESTION, "max_output_tokens": 32, "temperature": 0, "store": False}
    with responses.stream(**asked) as stream:
        streamed_response = stream.get_final_response()
    for response in (responses.create(**asked), streamed_response):
        assert ("completed", by_openai.choices[0].message.content) == (response.status, response.output_text)
        assert by_openai.usage.prompt_tokens == response.usage.input_tokens
        assert by_openai.usage.completion_tokens == response.usage.output_tokens
    client = cluster.anthropic_client()
    question = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
    greedy = {"temperature": 0}
    whole = client.messages.create(**question, max_tokens=32, extra_body=greedy)
    with client.messages.stream(**question, max_tokens=32, extra_body=greedy) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert by_openai.choices[0].message.content == message.content[0].text
        assert "end_turn" == message.stop_reason
        # Cached tokens are part of the prompt's in one API and beside them in the other.
        assert by_openai.usage.prompt_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
        assert by_openai.usage.completion_tokens == message.usage.output_tokens
    assert by_openai.usage.prompt_tokens == client.messages.count_tokens(**question).input_tokens
    cut = client.messages.create(**question, max_tokens=2, extra_body=greedy)
    assert ("max_tokens", 2) == (cut.stop_reason, cut.usage.output_tokens)


def test_a_long_prompt_returns_to_the_worker_that_holds_it(cluster: EmbeddedCluster) -> None:
    first = ask(cluster, LONG_PROMPT, max_tokens=4)
    home = chosen_worker(cluster.decision(first.id.removeprefix("chatcmpl-")))
    eventually("router, KV master and ledgers agree", lambda: cluster.kv_is_equal(2))
    again = ask(cluster, LONG_PROMPT, max_tokens=4)
    assert again.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens // 2
    decision = cluster.decision(again.id.removeprefix("chatcmpl-"))
    assert home == chosen_worker(decision)
    matched = {candidate.worker_uid: [match.blocks for match in candidate.matches] for candidate in decision.candidates}
    assert 2 == len(matched)
    assert [(first.usage.prompt_tokens - 1) // decision.block_size_tokens] == matched.pop(home)
    assert {SOURCE_STATE_EXACT} == {candidate.source_state for candidate in decision.candidates}
    assert decision.candidates[decision.chosen_candidate].cost == min(one.cost for one in decision.candidates)
    explained = cluster.kvist("route", "explain", again.id.removeprefix("chatcmpl-"))
    assert all(uid in explained for uid in cluster.workers())
    assert (
        f"{again.usage.prompt_tokens_details.cached_tokens} of {first.usage.prompt_tokens} tokens cached" in explained
    )


def test_what_the_ledger_claims_is_what_the_engine_finds(cluster: EmbeddedCluster) -> None:
    """Random prompts that share random beginnings: the claim equals the engine's own count in whole blocks."""
    dice = random.Random(20_26)
    words = ["river", "stone", "seven", "quiet", "paper", "under", "light", "green", "north", "seldom"]
    stems = [" ".join(dice.choices(words, k=dice.randrange(20, 120))) for _ in range(12)]
    with cluster.router() as router:
        for _ in range(RANDOM_PROMPTS):
            request = router_pb2.GenerateRequest(model=MODEL)
            stem = dice.choice(stems)
            request.prompt.text = f"{stem[: dice.randrange(len(stem))]} {' '.join(dice.choices(words, k=8))}"
            request.stop.max_tokens = 1
            request.sampling.temperature = 0
            *_, last = router.Generate(request, timeout=60)
            receipt = last.finished.receipt
            assert receipt.HasField("claimed_blocks")
            assert receipt.claimed_blocks == receipt.cached_tokens // receipt.block_size_tokens
    eventually("router, KV master and ledgers agree", lambda: cluster.kv_is_equal(2))
