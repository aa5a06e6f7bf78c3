"""`engineArgs`: vLLM's own flags, by their own names. Pure.

A name is a flag without its leading dashes, with `-` or `_`; a value is what the flag takes. `null` leaves the flag
out, `true` is the bare flag, `false` its `--no-` form, a list several values, an object one JSON value. vLLM's own
parser reads the result, so that names, types and messages are vLLM's.

Some flags are not a caller's to set: they read or write files of the node, run code that is named by a text, open a
socket, print prompts, or are the adapter's own.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvist.errors import FieldViolation, KvistError, invalid

PATH = "engine_arguments"
_READS_FILES = "it reads or writes files of the node"
_RUNS_CODE = "it runs code that a text names"
_OPENS_DOORS = "it makes the engine speak with other hosts"
_OWN = "Kvist sets it itself"
_PRINTS = "it prints what clients say, or a secret, into logs"

REFUSED: Mapping[str, str] = {
    # Of the command line and the HTTP server, which is not there; named so that the reason is clear.
    "config": _READS_FILES,
    "host": _OPENS_DOORS,
    "port": _OPENS_DOORS,
    "uds": _OPENS_DOORS,
    "grpc": _OPENS_DOORS,
    "headless": _OPENS_DOORS,
    "api_key": _PRINTS,
    "middleware": _RUNS_CODE,
    "chat_template": _READS_FILES,
    "tool_parser_plugin": _RUNS_CODE,
    # Of the engine.
    "additional_config": _RUNS_CODE,
    "allowed_local_media_path": _READS_FILES,
    "allowed_media_domains": _OPENS_DOORS,
    "data_parallel_address": _OPENS_DOORS,
    "data_parallel_backend": _OPENS_DOORS,
    "data_parallel_external_lb": _OPENS_DOORS,
    "data_parallel_hybrid_lb": _OPENS_DOORS,
    "data_parallel_multi_port_external_lb": _OPENS_DOORS,
    "data_parallel_rank": _OPENS_DOORS,
    "data_parallel_rpc_port": _OPENS_DOORS,
    "data_parallel_size_local": _OPENS_DOORS,
    "data_parallel_start_rank": _OPENS_DOORS,
    "disable_log_stats": _OWN,
    "download_dir": _READS_FILES,
    "enable_log_requests": _PRINTS,
    "hf_config_path": _READS_FILES,
    "hf_token": _PRINTS,
    "io_processor_plugin": _RUNS_CODE,
    "kv_events_config": _OWN,
    "log_config_file": _READS_FILES,
    "logging_config": _READS_FILES,
    "logits_processors": _RUNS_CODE,
    "master_addr": _OPENS_DOORS,
    "master_port": _OPENS_DOORS,
    "mm_encoder_fp8_scale_path": _READS_FILES,
    "mm_encoder_fp8_scale_save_path": _READS_FILES,
    "model_class_overrides": _RUNS_CODE,
    "model_loader_extra_config": _READS_FILES,
    "nnodes": _OPENS_DOORS,
    "node_rank": _OPENS_DOORS,
    "profiler_config": _READS_FILES,
    "reasoning_parser_plugin": _RUNS_CODE,
    "scheduler_cls": _RUNS_CODE,
    "served_model_name": _OWN,
    "skip_tokenizer_init": _OWN,
    "tokens_only": _OWN,
    "trust_remote_code": _RUNS_CODE,
    "weight_transfer_config": _OPENS_DOORS,
    "worker_cls": _RUNS_CODE,
    "worker_extension_cls": _RUNS_CODE,
}
# Flags of which some values are harmless.
_KNOWN_VALUES: Mapping[str, Collection[str]] = {
    "distributed_executor_backend": ("mp", "ray", "uni"),
    "generation_config": ("auto", "vllm"),
}
# Keys of objects that name a module to load.
_CODE_KEYS: Mapping[str, Collection[str]] = {
    "kv_transfer_config": ("kv_connector_module_path",),
    "ec_transfer_config": ("ec_connector_module_path",),
    "compilation_config": ("custom_ops_module", "inductor_passes"),
}


@dataclass(frozen=True, slots=True)
class VllmArguments:
    """Checked arguments.

    Attributes:
        flags: The command line for vLLM's parser.
        adapters: Paths of LoRA adapters by name, of `lora-modules`.
        worker_extension: Name of a class of ours that vLLM mixes into its workers; empty for none.
    """

    flags: tuple[str, ...]
    adapters: Mapping[str, str]
    worker_extension: str = ""


def read(arguments: Mapping[str, Any], *, known: Collection[str]) -> VllmArguments:
    """Checks arguments and makes a command line of them.

    Args:
        arguments: By flag.
        known: Names of the engine's flags, with `_`.

    Raises:
        KvistError: `INVALID_ARGUMENT`, with each wrong one and why.
    """
    problems: list[FieldViolation] = []
    flags: list[str] = []
    adapters: dict[str, str] = {}
    seen: dict[str, str] = {}
    for given, value in arguments.items():
        name = given.replace("-", "_")
        try:
            _check_name(name, known=known, twin=seen.get(name))
            if name == "lora_modules":
                adapters = _adapters(value)
            else:
                _check_value(name, value)
                flags += _flag(name.replace("_", "-"), value)
        except ValueError as failure:
            problems.append(FieldViolation(f"{PATH}.{given}", str(failure)))
        seen[name] = given
    if "model" not in seen:
        problems.append(FieldViolation(f"{PATH}.model", "is needed: a folder, or a name on Hugging Face"))
    if problems:
        raise invalid(problems)
    return VllmArguments(tuple(flags), adapters)


def refused_by_vllm(message: str) -> KvistError:
    """What vLLM's parser said, as an error of the arguments."""
    return invalid([FieldViolation(PATH, f"vLLM refuses them: {message}")])


def _check_name(name: str, *, known: Collection[str], twin: str | None) -> None:
    if twin is not None:
        raise ValueError(f"is given as {twin} too")
    if name in REFUSED:
        raise ValueError(f"is refused: {REFUSED[name]}")
    if name != "lora_modules" and (name not in known or name.startswith("_")):
        raise ValueError("is no argument of vLLM's engine")


def _check_value(name: str, value: Any) -> None:
    if name in _KNOWN_VALUES and value is not None and value not in _KNOWN_VALUES[name]:
        raise ValueError(f"must be one of {', '.join(_KNOWN_VALUES[name])}")
    if name in _CODE_KEYS and isinstance(value, Mapping):
        for key in _CODE_KEYS[name]:
            if value.get(key):
                raise ValueError(f"{key} is refused: {_RUNS_CODE}")


def _flag(flag: str, value: Any) -> list[str]:
    match value:
        case None:
            return []
        case True:
            return [f"--{flag}"]
        case False:
            return [f"--no-{flag}"]
        case Mapping():
            return [f"--{flag}={_json(value)}"]
        case str():
            return [f"--{flag}={value}"]
        case Sequence():
            items = [_item(item) for item in value]
            if any(item.startswith("-") for item in items):
                raise ValueError("a value of a list may not begin with '-'")
            return [f"--{flag}", *items] if items else []
        case int() | float():
            return [f"--{flag}={value}"]
        case _:
            raise ValueError("must be a truth value, a number, a text, a list or an object")


def _item(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _adapters(value: Any) -> dict[str, str]:
    """Reads `NAME=PATH` and objects, as vLLM takes them; a mapping from name to path is the same."""
    if value is None:
        return {}
    entries: list[tuple[Any, Any]]
    if isinstance(value, Mapping):
        entries = list(value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str):
        entries = [
            (item.get("name"), item.get("path")) if isinstance(item, Mapping) else str(item).partition("=")[::2]
            for item in value
        ]
    else:
        raise ValueError("must be a list of NAME=PATH, or an object of paths by name")  # noqa: TRY004  As all others.
    found: dict[str, str] = {}
    for name, path in entries:
        if not (isinstance(name, str) and isinstance(path, str) and name and path):
            raise ValueError("each adapter needs a name and a path")
        if name in found:
            raise ValueError(f"the adapter {name} is given twice")
        found[name] = path
    return found
