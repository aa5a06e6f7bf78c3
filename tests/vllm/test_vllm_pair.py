"""Two vLLM engines that divide requests: the prompt's KV goes through a folder that both see."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.embedded import EmbeddedCluster, eventually
from support.vllm_pair import (
    TEXT,
    alone,
    ask,
    check_that_a_dead_decode_engine_is_one_error,
    check_that_leaving_clients_leave_nothing,
    load_of,
    rounds,
    running_pair,
    whole_blocks,
)

pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, engine_arguments: dict[str, Any], shared_folder: Path
) -> Iterator[EmbeddedCluster]:
    transfer = {"connector": "ExampleConnector", "sharedFolder": str(shared_folder)}
    with running_pair(tmp_path_factory.mktemp("pair"), engine_arguments, transfer) as running:
        yield running


def test_a_pair_answers_as_one_engine_does_with_kv_from_outside(cluster: EmbeddedCluster, shared_folder: Path) -> None:
    divided = ask(cluster, TEXT)
    assert rounds(cluster, divided) == [("prefill", "handed_over"), ("decode", "length")]
    assert any(shared_folder.iterdir())
    eventually(
        "the decode engine has counted what came",
        lambda: load_of(cluster, "decode").external_tokens_total == whole_blocks(divided),
    )
    assert load_of(cluster, "prefill").external_tokens_total == 0
    # The decode worker's cache has the prompt now, so nothing is divided.
    again = ask(cluster, TEXT)
    assert rounds(cluster, again) == [("", "length")]
    assert again.choices[0].text == divided.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens == whole_blocks(again)
    short = ask(cluster, "The capital of France is", max_tokens=4)
    assert rounds(cluster, short) == [("", "length")]
    assert "Paris" in short.choices[0].text


def test_an_engine_that_was_sent_nothing_draws_the_same_tokens(cluster: EmbeddedCluster, shared_folder: Path) -> None:
    text = f"Once more, from the beginning. {TEXT}"
    divided = ask(cluster, text)
    assert rounds(cluster, divided)[0] == ("prefill", "handed_over")
    # Neither the cache nor the folder has it then.
    for folder in shared_folder.iterdir():
        shutil.rmtree(folder)
    external = load_of(cluster, "decode").external_tokens_total
    assert alone(cluster, text, max_tokens=12) == (divided.choices[0].text, 0)
    assert load_of(cluster, "decode").external_tokens_total == external


def test_a_client_that_leaves_leaves_nothing_behind(cluster: EmbeddedCluster) -> None:
    check_that_leaving_clients_leave_nothing(cluster)


def test_a_decode_engine_that_dies_is_one_error_and_the_mesh_recovers(cluster: EmbeddedCluster) -> None:
    check_that_a_dead_decode_engine_is_one_error(cluster)
