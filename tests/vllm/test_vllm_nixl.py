"""Two vLLM engines that hand KV over by NIXL, over TCP on loopback. Runs where the package is: `./task test:nixl`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvist import engines
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


def _has_nixl() -> bool:
    environment = engines.find("vllm")
    return environment is not None and any(environment.folder.glob("lib/python3.*/site-packages/nixl/__init__.py"))


pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not _has_nixl(), reason="nixl is not installed: ./task test:nixl"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, engine_arguments: dict[str, Any]) -> Iterator[EmbeddedCluster]:
    transfer = {"connector": "NixlConnector", "protocol": "tcp", "lease": "20s"}
    with running_pair(tmp_path_factory.mktemp("nixl"), engine_arguments, transfer) as running:
        yield running


def test_kv_goes_over_tcp_and_the_answer_is_that_of_one_engine(cluster: EmbeddedCluster) -> None:
    divided = ask(cluster, TEXT)
    assert rounds(cluster, divided) == [("prefill", "handed_over"), ("decode", "length")]
    eventually(
        "the decode engine has counted what came",
        lambda: load_of(cluster, "decode").external_tokens_total >= whole_blocks(divided),
    )
    assert load_of(cluster, "prefill").external_tokens_total == 0
    assert alone(cluster, TEXT, max_tokens=12) == (divided.choices[0].text, 0)


def test_a_client_that_leaves_leaves_nothing_behind(cluster: EmbeddedCluster) -> None:
    check_that_leaving_clients_leave_nothing(cluster)


def test_a_decode_engine_that_dies_is_one_error_and_the_mesh_recovers(cluster: EmbeddedCluster) -> None:
    check_that_a_dead_decode_engine_is_one_error(cluster)
