"""Manifests: defaults, and refusals that name each wrong field."""

from typing import get_args

import pytest

from kvist import _core
from kvist.errors import InvalidRequestError
from kvist_controller.resources import ReasoningParser, ToolParser, check_identity, parse_model_service


def refused(spec: dict) -> dict[str, str]:
    with pytest.raises(InvalidRequestError) as caught:
        parse_model_service(spec, name="smol")
    assert caught.value.code == "INVALID_MANIFEST"
    return {violation.field: violation.description for violation in caught.value.fields}


def test_a_small_manifest_gets_all_defaults() -> None:
    spec = parse_model_service({"engine": {"name": "sim"}}, name="smol")
    assert spec.to_plain() == {
        "model": "smol",
        "engine": {"name": "sim", "arguments": {}},
        "replicas": 1,
        "aliases": [],
        "role": "aggregate",
        "drainTimeout": "30s",
        "startupTimeout": "600s",
    }


def test_the_plain_form_is_read_back_as_the_same_specification() -> None:
    spec = parse_model_service(
        {
            "engine": {"name": "sim", "arguments": {"blocks": 8}},
            "drainTimeout": "1.5s",
            "hashUnitTokens": 16,
            "toolParser": "hermes",
            "reasoningParser": "none",
        },
        name="smol",
    )
    assert parse_model_service(spec.to_plain(), name="other") == spec


def test_every_wrong_field_is_named_and_near_misses_get_a_suggestion() -> None:
    violations = refused(
        {"engine": {"name": "lamacpp", "argumens": {}}, "replicas": -1, "drain_timeout": "5s", "aliases": ["a b"]}
    )
    assert violations.keys() == {
        "spec.engine.name",
        "spec.engine.argumens",
        "spec.replicas",
        "spec.drain_timeout",
        "spec.aliases[0]",
    }
    assert "did you mean 'llamacpp'?" in violations["spec.engine.name"]
    assert "did you mean 'arguments'?" in violations["spec.engine.argumens"]
    assert "did you mean 'drainTimeout'?" in violations["spec.drain_timeout"]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({}, "spec.engine"),
        ({"engine": "sim"}, "spec.engine"),
        ({"engine": {"name": "sim"}, "replicas": 1.5}, "spec.replicas"),
        ({"engine": {"name": "sim"}, "replicas": 100_000}, "spec.replicas"),
        ({"engine": {"name": "sim"}, "drainTimeout": "soon"}, "spec.drainTimeout"),
        ({"engine": {"name": "sim"}, "drainTimeout": True}, "spec.drainTimeout"),
        ({"engine": {"name": "sim"}, "startupTimeout": "0s"}, "spec.startupTimeout"),
        ({"engine": {"name": "sim"}, "role": "prefill"}, "spec.role"),
        ({"engine": {"name": "sim"}, "tokenizerDigest": "abc"}, "spec.tokenizerDigest"),
        ({"engine": {"name": "sim"}, "model": "a", "aliases": ["a"]}, "spec"),
        ({"engine": {"name": "sim"}, "toolParser": "qwen"}, "spec.toolParser"),
        ({"engine": {"name": "sim"}, "reasoningParser": 1}, "spec.reasoningParser"),
    ],
)
def test_a_wrong_value_is_refused_by_path(spec: dict, field: str) -> None:
    assert refused(spec).keys() == {field}


def test_a_policy_is_stored_as_it_is_written() -> None:
    policy = {
        "routing": {"scorers": [{"algorithm": "prefix", "weight": 2}, {"algorithm": "queue_depth"}]},
        "admission": {"concurrency": {"maxConcurrentRequests": 8, "queueTimeout": "2m"}},
    }
    plain = parse_model_service({"engine": {"name": "sim"}, **policy}, name="smol").to_plain()
    assert {name: plain[name] for name in policy} == policy
    everything = parse_model_service({"engine": {"name": "sim"}, "admission": "allow_all"}, name="smol")
    assert everything.to_plain()["admission"] == "allow_all"


@pytest.mark.parametrize(
    ("policy", "field", "hint"),
    [
        ({"routing": {"preset": "nosuch"}}, "routing.preset", "valid: kvist, foretoken"),
        ({"routing": {"scorers": [{"algorithm": "nosuch"}]}}, "routing.scorers[0].algorithm", "kv_least_loaded"),
        ({"routing": {"picker": {"algorithm": "round_robin"}}}, "routing.picker.algorithm", "power_of_two_choices"),
        (
            {"routing": {"scorer": {"algorithm": "cost", "parameters": {"wait": 1}}}},
            "routing.scorers[0].parameters.wait",
            "recomputeWeight",
        ),
        ({"routing": {"stages": []}}, "routing", "unknown field `stages`"),
        ({"routing": "cost"}, "routing", "dictionary"),
        ({"admission": "everybody"}, "admission", "allow_all"),
        ({"admission": {"concurrency": {}}}, "admission.concurrency", "maxConcurrentRequests"),
        (
            {"admission": {"concurrency": {"maxConcurrentRequests": 0}}},
            "admission.concurrency.maxConcurrentRequests",
            "above 0",
        ),
    ],
)
def test_a_policy_that_no_router_would_take_is_refused_with_what_there_is(policy: dict, field: str, hint: str) -> None:
    violations = refused({"engine": {"name": "sim"}, **policy})
    assert violations.keys() == {f"spec.{field}"}
    assert hint in violations[f"spec.{field}"]


def test_all_that_is_wrong_is_said_at_once() -> None:
    assert refused({"engine": {"name": "sim"}, "replicas": -1, "routing": {"preset": "x"}}).keys() == {
        "spec.replicas",
        "spec.routing.preset",
    }


def test_parsers_are_those_that_the_router_has() -> None:
    assert ["none", *_core.tool_parsers()] == list(get_args(ToolParser))
    assert ["none", *_core.reasoning_parsers()] == list(get_args(ReasoningParser))
    refusal = refused({"engine": {"name": "sim"}, "toolParser": "mistrall"})["spec.toolParser"]
    assert refusal.startswith(f"must be one of none, {', '.join(_core.tool_parsers())}, did you mean 'mistral'?")


def test_identity_is_checked() -> None:
    violations = check_identity(api_version="v1", kind="Modelservice", name="Smol_2")
    assert [violation.field for violation in violations] == ["apiVersion", "kind", "metadata.name"]
    assert "did you mean 'ModelService'?" in violations[1].description
    assert check_identity(api_version="kvist.dev/v1alpha1", kind="ModelService", name="smol-2") == []
