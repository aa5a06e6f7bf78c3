"""Adapters, one module for each engine; only that module imports the engine."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvist.errors import FieldViolation, error, invalid, invalid_field
from kvist_worker.engine import EngineAdapter
from kvist_worker.settings import HandOverSettings

NAMES = ("attached", "llamacpp", "sim", "vllm")


def create(
    name: str, arguments: Mapping[str, Any], hand_over: HandOverSettings | None = None, *, is_prefill: bool = False
) -> EngineAdapter | None:
    """The adapter of an engine; none for those that the core brings: the simulated one and servers that run already.

    Raises:
        KvistError: `INVALID_ARGUMENT` for wrong arguments or an unknown name, `NOT_IMPLEMENTED` for an engine that is
            not there.
    """
    match name:
        case "attached" | "sim":
            return None
        case "llamacpp":
            try:
                # Imported here: a worker loads the one engine it hosts.
                from kvist_worker.engines.llamacpp.adapter import LlamaCppEngine  # noqa: PLC0415
                from kvist_worker.engines.llamacpp.embeddings import LlamaCppEmbedder  # noqa: PLC0415
                from kvist_worker.engines.llamacpp.model import LlamaCppArguments  # noqa: PLC0415
            except ImportError as failure:
                raise error(
                    "NOT_IMPLEMENTED", "the engine llamacpp needs the extra `llamacpp` of kvist-worker"
                ) from failure
            try:
                checked = LlamaCppArguments.model_validate(dict(arguments))
            except ValidationError as failure:
                raise invalid(
                    [
                        FieldViolation(".".join(("engine_arguments", *map(str, item["loc"]))), item["msg"])
                        for item in failure.errors(include_url=False)
                    ]
                ) from failure
            return LlamaCppEmbedder(checked) if checked.embeddings else LlamaCppEngine(checked)
        case "vllm":
            try:
                from kvist_worker.engines.vllm import binding  # noqa: PLC0415
                from kvist_worker.engines.vllm.adapter import VllmEngine  # noqa: PLC0415
            except ImportError as failure:
                raise error(
                    "NOT_IMPLEMENTED", f"vLLM cannot be imported ({failure}): kvist engine install vllm --cpu or --cuda"
                ) from failure
            return VllmEngine(binding.VllmBinding(binding.read_arguments(arguments, hand_over, is_prefill=is_prefill)))
        case _:
            raise invalid_field("engine", f"must be one of {', '.join(NAMES)}")
