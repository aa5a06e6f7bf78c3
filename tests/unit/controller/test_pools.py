"""Pools of a model service: roles that go together, what each is started with, and what routers hear of it."""

from typing import Any

import pytest

from kvist.engine.v1.engine_pb2 import (
    ROLE_DECODE,
    ROLE_PREFILL,
    TRANSFER_FAILURE_POLICY_FAIL,
    TRANSFER_PROTOCOL_RDMA,
    TRANSFER_PROTOCOL_TCP,
    KvLayout,
    WorkerDescription,
)
from kvist.errors import InvalidRequestError
from kvist_controller.hand_over import KvDivision, group_of
from kvist_controller.resources import ModelServiceSpec, parse_model_service
from kvist_controller.revision import pool_revision

PAIR = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode", "replicas": 2}]
TCP = {"connector": "sim", "protocol": "tcp"}


def parse(**spec: Any) -> ModelServiceSpec:
    return parse_model_service({"engine": {"name": "sim"}, **spec}, name="m")


def violations(**spec: Any) -> dict[str, str]:
    with pytest.raises(InvalidRequestError) as raised:
        parse(**spec)
    return {violation.field: violation.description for violation in raised.value.fields}


def test_a_pair_is_taken_and_comes_back_with_its_defaults() -> None:
    spec = parse(pools=PAIR, kvTransfer=TCP)
    assert [(pool.name, pool.replicas, pool.wire_role) for pool in spec.all_pools] == [
        ("p", 1, ROLE_PREFILL),
        ("d", 2, ROLE_DECODE),
    ]
    assert spec.total_replicas == 3
    plain = spec.to_plain()
    assert plain["kvTransfer"] == {
        "connector": "sim", "protocol": "tcp", "lease": "30s", "onFailure": "recompute", "prefillFromTokens": 512,
    }  # fmt: skip
    assert parse_model_service(plain, name="m") == spec
    wire = spec.hand_over
    assert wire is not None
    assert (wire.protocol, wire.lease_duration.seconds, wire.prefill_from_tokens) == (TRANSFER_PROTOCOL_TCP, 30, 512)


def test_without_pools_there_is_one_as_before() -> None:
    spec = parse(replicas=3)
    assert [(pool.name, pool.role, pool.replicas) for pool in spec.all_pools] == [("aggregate", "aggregate", 3)]
    assert "pools" not in spec.to_plain()
    assert spec.hand_over is None


@pytest.mark.parametrize(
    ("spec", "field", "why"),
    [
        ({"pools": PAIR[:1], "kvTransfer": TCP}, "spec.pools", "incomplete P/D: there is a prefill pool"),
        ({"pools": PAIR[1:], "kvTransfer": TCP}, "spec.pools", "incomplete P/D: there is a decode pool"),
        ({"pools": [*PAIR, {"name": "a", "role": "aggregate"}], "kvTransfer": TCP}, "spec.pools", "aggregate pools"),
        ({"pools": [PAIR[0], {**PAIR[1], "name": "p"}], "kvTransfer": TCP}, "spec.pools", "more than once"),
        ({"pools": PAIR}, "spec.kvTransfer", "is required"),
        ({"pools": PAIR, "kvTransfer": {"connector": "sim"}}, "spec.kvTransfer.protocol", "must be written as tcp"),
        ({"pools": PAIR, "kvTransfer": {"connector": "NixlConnector"}}, "spec.kvTransfer.connector", "one of sim"),
        ({"kvTransfer": TCP}, "spec.kvTransfer", "there are none"),
        ({"pools": [{"name": "a", "role": "aggregate"}], "kvTransfer": TCP}, "spec.kvTransfer", "there are none"),
        ({"pools": PAIR, "kvTransfer": {**TCP, "rdmaDevice": "mlx5_0"}}, "spec.kvTransfer", "belongs to protocol rdma"),
        ({"pools": PAIR, "kvTransfer": {**TCP, "sharedFolder": "/kv"}}, "spec.kvTransfer", "to ExampleConnector"),
        ({"pools": PAIR, "kvTransfer": {**TCP, "lease": "0s"}}, "spec.kvTransfer.lease", "greater than 0"),
        ({"pools": PAIR, "kvTransfer": TCP, "replicas": 2}, "spec", "replicas are those of each pool"),
        ({"engine": {"name": "llamacpp"}, "pools": PAIR, "kvTransfer": TCP}, "spec.pools", "cannot hand KV over"),
        ({"pools": [{"name": "x", "role": "encoder"}]}, "spec.pools[0].role", "must be one of"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_with_its_path(spec: dict[str, Any], field: str, why: str) -> None:
    assert why in violations(**spec)[field]


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        (KvDivision(tensor=4), KvDivision(tensor=2), ""),
        (KvDivision(tensor=2), KvDivision(tensor=4), ""),
        (KvDivision(tensor=4), KvDivision(tensor=3), "tensor parallelism 4 and 3"),
        (KvDivision(prefill_context=2), KvDivision(), "prefill context parallelism differs: 2 and 1"),
        (KvDivision(tensor=4, decode_context=2), KvDivision(tensor=4), "decode context parallelism differs: 2 and 1"),
    ],
)
def test_layouts_that_can_exchange_kv(one: KvDivision, other: KvDivision, why: str) -> None:
    assert one.difference(other).startswith(why)
    assert bool(one.difference(other)) == bool(why)


def test_layouts_of_the_arguments_are_compared_before_anything_starts() -> None:
    pools = [
        {"name": "p", "role": "prefill", "engineArgs": {"model": "m", "tensor-parallel-size": 4}},
        {"name": "d", "role": "decode", "engineArgs": {"model": "m", "tensor_parallel_size": 3}},
    ]
    transfer = {"connector": "NixlConnector", "protocol": "tcp"}
    refused = violations(engine={"name": "vllm"}, pools=pools, kvTransfer=transfer)
    assert "cannot hand KV to the pool 'd'" in refused["spec.pools[0]"]


def test_a_pools_arguments_replace_those_of_the_service() -> None:
    pools = [{**PAIR[0], "engineArgs": {"blocks": 64}}, PAIR[1]]
    spec = parse(engine={"name": "sim", "arguments": {"textTokens": 3}}, pools=pools, kvTransfer=TCP)
    assert [spec.arguments_of(pool) for pool in spec.all_pools] == [{"blocks": 64}, {"textTokens": 3}]


def test_rdma_is_the_default_and_policies_travel() -> None:
    transfer = {"connector": "NixlConnector", "rdmaDevice": "mlx5_0", "onFailure": "fail"}
    wire = parse(engine={"name": "vllm"}, pools=PAIR, kvTransfer=transfer).hand_over
    assert wire is not None
    assert (wire.protocol, wire.on_failure) == (TRANSFER_PROTOCOL_RDMA, TRANSFER_FAILURE_POLICY_FAIL)
    assert wire.rdma_device == "mlx5_0"


def test_a_revision_is_a_pools_own_and_knows_nothing_of_when_prompts_are_divided() -> None:
    def revisions(**transfer: Any) -> list[str]:
        spec = parse(pools=PAIR, kvTransfer=TCP | transfer)
        return [pool_revision(spec, pool) for pool in spec.all_pools]

    assert len(set(revisions())) == 2
    assert revisions() == revisions(prefillFromTokens=9)
    assert set(revisions()).isdisjoint(revisions(lease="5s"))


def test_workers_of_one_layout_are_of_one_group() -> None:
    layout = KvLayout(connector="sim", tensor_parallel_size=2)
    description = WorkerDescription(block_size_tokens=16, kv_layout=layout)
    assert group_of("s", description) == "s/sim/b16/p1/d1"
    assert group_of("s", WorkerDescription(block_size_tokens=16)) == ""
    layout.decode_context_parallel_size = 2
    assert group_of("s", WorkerDescription(block_size_tokens=16, kv_layout=layout)) == "s/sim/b16/p1/d2"
