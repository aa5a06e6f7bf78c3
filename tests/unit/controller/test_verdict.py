"""Verdicts: what does not fit is refused with its reason, what is odd is a warning."""

import pytest

from kvist.agent.v1.agent_pb2 import WorkerSpec
from kvist.engine.v1.engine_pb2 import WorkerDescription
from kvist_controller.verdict import PoolContract, judge

SPEC = WorkerSpec(worker_uid="w-0", model="smol", engine="sim", pool_uid="p", pool_revision="r1", hash_seed=7)


def description(**changes: object) -> WorkerDescription:
    fields = {
        "worker_uid": "w-0",
        "incarnation": 5,
        "model": "smol",
        "engine": "sim",
        "block_size_tokens": 16,
        "tokenizer_digest": "aa",
        "template_digest": "tt",
        "pool_revision": "r1",
        "hash_seed": 7,
        "capabilities": {"kv_events": True},
    }
    return WorkerDescription(**{**fields, **changes})


FIXED = PoolContract(tokenizer_digest="aa", hash_unit_tokens=16, template_digest="tt")


def test_the_first_accepted_worker_fixes_the_contract() -> None:
    verdict, contract = judge(description(), spec=SPEC, hash_seed=7, contract=PoolContract())
    assert verdict.is_accepted
    assert verdict.warnings == ()
    assert contract == FIXED


def test_a_multiple_of_the_hash_unit_fits() -> None:
    verdict, contract = judge(description(block_size_tokens=64), spec=SPEC, hash_seed=7, contract=FIXED)
    assert verdict.is_accepted
    assert contract == FIXED


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"tokenizer_digest": "bb"}, "tokenizer"),
        ({"tokenizer_digest": ""}, "tokenizer"),
        ({"block_size_tokens": 24}, "block size of 24"),
        ({"block_size_tokens": 0}, "no block size"),
        ({"model": "large"}, "model 'large'"),
        ({"engine": "vllm"}, "engine 'vllm'"),
        ({"pool_revision": "r0"}, "revision 'r0'"),
        ({"hash_seed": 8}, "another seed"),
        ({"worker_uid": "w-9"}, "'w-9'"),
        ({"incarnation": 0}, "no incarnation"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(change: dict, part: str) -> None:
    verdict, contract = judge(description(**change), spec=SPEC, hash_seed=7, contract=FIXED)
    assert part in verdict.refused_reason
    assert contract == FIXED


def test_a_refused_worker_fixes_nothing() -> None:
    pinned = PoolContract(tokenizer_digest="cc")
    verdict, contract = judge(description(), spec=SPEC, hash_seed=7, contract=pinned)
    assert not verdict.is_accepted
    assert contract == pinned


def test_all_reasons_are_given_at_once() -> None:
    verdict, _ = judge(description(model="x", hash_seed=1), spec=SPEC, hash_seed=7, contract=FIXED)
    assert "model 'x'" in verdict.refused_reason
    assert "another seed" in verdict.refused_reason


def test_another_template_and_missing_events_are_warnings() -> None:
    odd = description(template_digest="uu", capabilities={"kv_events": False})
    verdict, _ = judge(odd, spec=SPEC, hash_seed=7, contract=FIXED)
    assert verdict.is_accepted
    assert len(verdict.warnings) == 2
