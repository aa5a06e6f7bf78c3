"""`engineArgs` become vLLM's own flags, and some are not a caller's to set."""

from __future__ import annotations

from typing import Any

import pytest

from kvist.errors import InvalidRequestError
from kvist_worker.engines.vllm import arguments
from kvist_worker.engines.vllm.layout import ParallelLayout
from kvist_worker.engines.vllm.version import VllmVersion, check

KNOWN = {
    "model", "max_model_len", "enforce_eager", "enable_prefix_caching", "speculative_config", "lora_target_modules",
    "gpu_memory_utilization", "tokenizer", "distributed_executor_backend", "kv_transfer_config", "generation_config",
    "_api_process_count", *arguments.REFUSED,
}  # fmt: skip


def read(**given: Any) -> arguments.VllmArguments:
    return arguments.read({"model": "m", **given}, known=KNOWN)


def test_values_of_all_kinds_become_flags() -> None:
    given = {
        "max-model-len": 512,
        "gpu_memory_utilization": 0.5,
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "tokenizer": "--config=x",
        "speculative-config": {"method": "ngram", "num_speculative_tokens": 3},
        "lora-target-modules": ["q", "k"],
        "generation-config": None,
    }
    assert read(**given).flags == (
        "--model=m",
        "--max-model-len=512",
        "--gpu-memory-utilization=0.5",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        # One word: a value cannot become a flag of its own.
        "--tokenizer=--config=x",
        '--speculative-config={"method":"ngram","num_speculative_tokens":3}',
        "--lora-target-modules",
        "q",
        "k",
    )


@pytest.mark.parametrize("name", sorted(arguments.REFUSED))
def test_flags_that_open_doors_are_refused_in_both_spellings(name: str) -> None:
    for spelling in {name, name.replace("_", "-")}:
        with pytest.raises(InvalidRequestError) as refused:
            read(**{spelling: None})
        [field] = refused.value.fields
        assert field.field == f"engine_arguments.{spelling}"
        assert "is refused: " in field.description


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"max-model-len": 1, "max_model_len": 2}, "is given as max-model-len too"),
        ({"max-model": 1}, "is no argument of vLLM's engine"),
        ({"speculative-config.method": "ngram"}, "is no argument of vLLM's engine"),
        ({"_api_process_count": 1}, "is no argument of vLLM's engine"),
        ({"lora-target-modules": ["--config"]}, "may not begin with '-'"),
        ({"distributed-executor-backend": "evil.Executor"}, "must be one of mp, ray, uni"),
        ({"generation-config": "/etc"}, "must be one of auto, vllm"),
        ({"kv-transfer-config": {"kv_connector_module_path": "evil"}}, "kv_connector_module_path is refused"),
        ({"lora-modules": ["name"]}, "each adapter needs a name and a path"),
        ({"lora-modules": ["a=/x", "a=/y"]}, "the adapter a is given twice"),
        ({"lora-modules": "a=/x"}, "must be a list of NAME=PATH"),
        ({"tokenizer": object()}, "must be a truth value"),
    ],
)
def test_what_cannot_be_right_is_named(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(**given)
    assert why in refused.value.fields[-1].description


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        arguments.read({"nonsense": 1, "hf-token": "x"}, known=KNOWN)
    named = [field.field for field in refused.value.fields]
    assert named == ["engine_arguments.nonsense", "engine_arguments.hf-token", "engine_arguments.model"]


@pytest.mark.parametrize(
    "given", [["a=/x", "b=/y=z"], [{"name": "a", "path": "/x"}, "b=/y=z"], {"a": "/x", "b": "/y=z"}]
)
def test_adapters_are_named_in_vllms_ways(given: Any) -> None:
    read_arguments = read(**{"lora-modules": given})
    assert (read_arguments.adapters, read_arguments.flags) == ({"a": "/x", "b": "/y=z"}, ("--model=m",))


@pytest.mark.parametrize(
    ("text", "line", "is_release"),
    [
        ("0.32.0", (0, 32), True),
        ("0.26.0", (0, 26), True),
        ("v0.12.0.post1+cpu", (0, 12), True),
        ("0.30.0.dev0+g1a2b3c4", (0, 30), False),
        ("0.32.1.dev17+g1a2b3c4.d20261130", (0, 32), False),
        ("0.33.0rc2", (0, 33), False),
        ("1.0", (1, 0), True),
    ],
)
def test_versions_of_all_kinds_are_read(text: str, line: tuple[int, int], is_release: bool) -> None:
    version = VllmVersion.parse(text)
    assert (version.line, version.is_release, version.is_tested) == (line, is_release, line == (0, 32))


def test_a_development_version_comes_before_its_release() -> None:
    texts = ["0.31.9", "0.32.0.dev1+gabc", "0.32.0", "0.32.1rc1", "0.32.1", "0.33.0.dev0"]
    versions = [VllmVersion.parse(text) for text in texts]
    assert versions == sorted(versions)


def test_what_the_adapter_cannot_work_with_is_refused() -> None:
    assert check("0.33.0.dev0+gabc").line == (0, 33)
    for text in ("0.31.2", "0.30.0.dev0+gabc", "dev", ""):
        with pytest.raises(Exception, match="vLLM") as refused:
            check(text)
        assert refused.value.code == "NOT_IMPLEMENTED"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("layout", "devices"),
    [
        ({"tensor": 4, "pipeline": 2}, 8),
        ({"tensor": 2, "data": 3}, 6),
        ({"tensor": 4, "decode_context": 2}, 4),
        ({"tensor": 2, "prefill_context": 2, "decode_context": 4}, 4),
        ({"tensor": 2, "prefill_context": 2, "decode_context": 2}, 4),
    ],
)
def test_a_layout_uses_the_product_of_its_sizes(layout: dict[str, int], devices: int) -> None:
    ParallelLayout(**layout).check(present_devices=devices)
    ParallelLayout(**layout).check(present_devices=None)
    with pytest.raises(InvalidRequestError, match=f"{devices + 1} devices are there, and TP .* = {devices} are needed"):
        ParallelLayout(**layout).check(present_devices=devices + 1)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ({"prefill_context": 2, "data": 2}, "cannot be more than 1 together with data-parallel-size"),
        ({"tensor": 4, "decode_context": 3}, "3 does not divide 4"),
        ({"tensor": 4, "prefill_context": 2, "decode_context": 4}, "must be 1, 2 or 8"),
    ],
)
def test_a_layout_that_cannot_run_is_refused(layout: dict[str, int], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        ParallelLayout(**layout).check(present_devices=None)
