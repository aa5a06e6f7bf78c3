"""What an embedded cluster runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GIBIBYTE = 1024**3
# Measured with the packaged model: 0.53 GiB for 4 slots of 4,096 tokens, and what five Python processes need. vLLM's
# three processes need 3 GiB with the same model; what a larger one needs is not known here.
BYTES_BY_ENGINE: Mapping[str, int] = {
    "llamacpp": int(0.6 * GIBIBYTE),
    "sim": int(0.1 * GIBIBYTE),
    "vllm": int(3.2 * GIBIBYTE),
}
BYTES_OF_CONTROL_PLANE = int(0.5 * GIBIBYTE)
MODEL_BY_ENGINE: Mapping[str, str] = {"llamacpp": "smollm2-135m", "sim": "sim", "vllm": "vllm"}
# Importing vLLM in three processes takes minutes on a busy machine.
STARTUP_SECONDS_BY_ENGINE: Mapping[str, int] = {"llamacpp": 300, "sim": 300, "vllm": 900}
DRAIN_SECONDS = 5


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What to run.

    Attributes:
        engine: Engine of the first model service, such as `llamacpp`.
        model: Its name, as clients say it.
        workers: Its replicas.
        engine_arguments: What its engine is told.
        http_listen: `host:port` of the HTTP edge.
        grpc_listen: `host:port` of the router's gRPC server.
    """

    engine: str = "llamacpp"
    model: str = MODEL_BY_ENGINE["llamacpp"]
    workers: int = 2
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    http_listen: str = "127.0.0.1:8000"
    grpc_listen: str = "127.0.0.1:7000"

    @property
    def needed_bytes(self) -> int:
        """Memory that should be free before a start."""
        return BYTES_OF_CONTROL_PLANE + self.workers * BYTES_BY_ENGINE.get(self.engine, 0)

    @property
    def startup_seconds(self) -> int:
        """How long a worker may take to become ready."""
        return STARTUP_SECONDS_BY_ENGINE[self.engine]

    def manifest(self) -> dict[str, Any]:
        """The model service, as one would write it for `kvist apply`."""
        return {
            "apiVersion": "kvist.dev/v1alpha1",
            "kind": "ModelService",
            "metadata": {
                "name": "".join(character if character.isalnum() else "-" for character in self.model.lower())
            },
            "spec": {
                "model": self.model,
                "engine": {"name": self.engine, "arguments": dict(self.engine_arguments)},
                "replicas": self.workers,
                "drainTimeout": f"{DRAIN_SECONDS}s",
                "startupTimeout": f"{self.startup_seconds}s",
            },
        }
