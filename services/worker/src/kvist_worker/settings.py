"""Settings of a worker: one JSON file, written by whoever starts it."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from kvist.engine.v1.engine_pb2 import ROLE_PREFILL
from kvist.settings import DoorSettings, TelemetrySettings

_UINT64_MAX = 2**64 - 1


class HandOverSettings(BaseModel):
    """How KV is handed over between engines; see `crates/worker/src/hand_over.rs`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    connector: str = "sim"
    """The connector, such as `NixlConnector`; `sim` for the simulated engine."""
    protocol: Literal["rdma", "tcp"] | None = None
    """What carries the KV; none where the connector goes through files."""
    shared_folder: str = ""
    """Folder that all engines of the model share, for connectors that go through files."""
    rdma_device: str = ""
    """Device of the RDMA network; empty for any."""
    lease_ms: int = Field(default=30_000, ge=1)
    """Milliseconds for which a prefill engine keeps blocks for a decode engine that does not come."""
    on_failure: Literal["recompute", "fail"] = "recompute"
    """What a decode engine does when the KV does not arrive."""


class WorkerSettings(DoorSettings):
    """Everything that a worker is told."""

    worker_uid: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+$", max_length=63)] = "worker-0"
    """UID of the slot; survives restarts."""
    model: Annotated[str, StringConstraints(min_length=1)] = "sim"
    """Name of the served model, as clients say it."""
    namespace: str = ""
    """Namespace of block hashes; the model's name when empty."""
    pool_uid: str = ""
    """UID of the pool; empty outside a cluster."""
    pool_revision: str = ""
    """Generation of the pool's contract."""
    role: int | str = "aggregate"
    """Role of the pool: its name, such as `aggregate`, or its number in the protocol."""
    hash_seed: int = Field(default=0, ge=0, le=_UINT64_MAX)
    """Seed of the cluster's block hashes."""
    grpc_listen: str = "127.0.0.1:0"
    """`host:port` of the gRPC server; port 0 takes a free one."""
    admin_listen: str = "127.0.0.1:0"
    """`host:port` of /metrics, /livez and /readyz."""
    incarnation_floor: int = Field(default=0, ge=0, lt=_UINT64_MAX)
    """The incarnation is larger than this."""
    ring_batches: int = Field(default=16_384, ge=1)
    """Batches that each ledger's ring holds."""
    digest_interval_ms: int = Field(default=2_000, ge=10)
    """Milliseconds between digests of a ledger."""
    drain_time_limit_ms: int = Field(default=30_000, ge=0)
    """Milliseconds that running requests may take when the worker is asked to stop."""
    generate_buffer_tokens: int = Field(default=65_536, ge=1)
    """Tokens that a caller of `Generate` may leave unread."""
    engine: Literal["attached", "llamacpp", "sim", "vllm"] = "sim"
    """Which engine."""
    engine_arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the engine, checked by its adapter."""
    hand_over: HandOverSettings | None = None
    """How KV is handed over; none for a worker that computes prompts and answers alone."""
    runtime_threads: int = Field(default=2, ge=1, le=64)
    """Threads of the server."""
    telemetry: TelemetrySettings = TelemetrySettings()
    """Logs; `admin_listen` above replaces the address in here."""

    @field_validator("engine_arguments")
    @classmethod
    def _whole_numbers(cls, value: dict[str, Any]) -> dict[str, Any]:
        return {name: _whole(item) for name, item in value.items()}

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        self.check_listen(self.grpc_listen)
        return self

    @property
    def is_prefill(self) -> bool:
        """Whether it computes prompts for decode workers."""
        return self.role in {"prefill", "ROLE_PREFILL", int(ROLE_PREFILL)}

    def core_json(self) -> str:
        """What the server in the core reads."""
        own = {"engine_arguments", "runtime_threads", "telemetry", *DoorSettings.model_fields}
        values = self.model_dump(exclude=own)
        values["door"] = self.core_door()
        if self.engine == "sim":
            values["sim"] = self.engine_arguments
        elif self.engine == "attached":
            values["engine_arguments"] = self.engine_arguments
        return json.dumps(values)


def _whole(value: Any) -> Any:
    """Numbers that came through a protobuf `Struct` have lost their type: whole ones are integers again."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    return value
