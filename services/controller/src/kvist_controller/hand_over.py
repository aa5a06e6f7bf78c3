"""Which pools can hand KV to each other, and by what. Pure.

What is checked here is what the resource says; what the workers then say of themselves decides which of them routers
bring together (`Target.group`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvist.engine.v1.engine_pb2 import WorkerDescription

NIXL = "NixlConnector"
EXAMPLE = "ExampleConnector"
SIM = "sim"
# Connectors by engine. Others of vLLM's are not known to be handed over the way that the router does it.
CONNECTORS: Mapping[str, tuple[str, ...]] = {"sim": (SIM,), "vllm": (NIXL, EXAMPLE), "llamacpp": ()}
# Connectors that speak over a network, whose protocol has to be known.
NETWORKED = (NIXL, SIM)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDivision:
    """How the KV of an engine is divided among its devices.

    Attributes:
        tensor: Devices that share each layer.
        prefill_context: Devices that share the context while a prompt is computed.
        decode_context: Devices that share the context while tokens are generated.
    """

    tensor: int = 1
    prefill_context: int = 1
    decode_context: int = 1

    @classmethod
    def of_arguments(cls, arguments: Mapping[str, Any]) -> Self:
        """As an engine's arguments say; what is no number there is left to the engine to refuse."""

        def size(*names: str) -> int:
            plain = {name.replace("-", "_"): value for name, value in arguments.items()}
            for name in names:
                value = plain.get(name)
                if isinstance(value, int | float) and value >= 1 and math.isfinite(value):
                    return int(value)
            return 1

        return cls(
            tensor=size("tensor_parallel_size", "tensorParallelSize"),
            prefill_context=size("prefill_context_parallel_size"),
            decode_context=size("decode_context_parallel_size"),
        )

    def difference(self, other: Self) -> str:
        """Why KV cannot go from the one to the other; empty when it can."""
        if self.prefill_context != other.prefill_context:
            return f"prefill context parallelism differs: {self.prefill_context} and {other.prefill_context}"
        if self.decode_context != other.decode_context:
            return f"decode context parallelism differs: {self.decode_context} and {other.decode_context}"
        if self.tensor % other.tensor and other.tensor % self.tensor:
            return f"tensor parallelism {self.tensor} and {other.tensor}: the one must divide the other"
        return ""


def group_of(service_uid: str, description: WorkerDescription) -> str:
    """Names the workers that can hand KV to each other; empty for one that hands nothing over."""
    if not description.HasField("kv_layout"):
        return ""
    layout = description.kv_layout
    return (
        f"{service_uid}/{layout.connector}/b{description.block_size_tokens}"
        f"/p{layout.prefill_context_parallel_size or 1}/d{layout.decode_context_parallel_size or 1}"
    )
