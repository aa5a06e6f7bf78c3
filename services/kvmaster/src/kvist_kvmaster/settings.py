"""Settings of the KV master."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator

from kvist.settings import BusSettings, ListenSettings, Settings, StoreSettings, TelemetrySettings


class KvMasterSettings(Settings):
    """Everything that a KV master is told."""

    name: str = "kvmaster-0"
    """Name of this process, for people."""
    cluster: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,63}$")] = "default"
    """Name of the cluster; part of NATS subjects."""
    grpc: ListenSettings = ListenSettings()
    """Where routers and people connect."""
    controllers: Annotated[tuple[str, ...], Field(min_length=1)] = ("127.0.0.1:7100",)
    """`host:port` of the controllers; tried in turn."""
    tls_ca_file: Path | None = None
    """PEM of the authorities that sign the certificates of workers and controllers; plain text without it."""
    controller_tls_ca_file: Path | None = None
    """PEM of the authorities that sign the controllers' certificates; `tls_ca_file` when absent."""
    store: StoreSettings | None = None
    """The controllers' state store: who leads among KV masters, and the named prefixes. Without it there are none, and
    every KV master takes itself for the leader."""
    leader_lease_seconds: float = Field(default=2.0, ge=1.0, le=60)
    """How long a dead leader holds up its successor."""
    bus: BusSettings = BusSettings(urls=("nats://127.0.0.1:4222",))
    """Where KV events come from."""
    index_byte_budget: int = Field(default=1024 * 1024 * 1024, ge=1024 * 1024)
    """Most bytes of the index."""
    worker_threads: int | None = Field(default=None, ge=1, le=1_024)
    """Threads of the index; one for each processor when absent."""
    telemetry: TelemetrySettings = TelemetrySettings()
    """Logs and the admin server."""

    @field_validator("bus")
    @classmethod
    def _has_a_bus(cls, value: BusSettings) -> BusSettings:
        if not value.urls:
            raise ValueError("urls must name at least one NATS server: an index without events is empty")
        return value
