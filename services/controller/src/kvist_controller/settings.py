"""Settings of the controller."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator

from kvist.settings import ListenSettings, Settings, StoreSettings, TelemetrySettings, split_address


class RegistrySettings(Settings):
    """How long nodes count as present."""

    lease_seconds: float = Field(default=10.0, gt=0, le=600)
    """How long a node counts as present after a heartbeat."""
    heartbeat_interval_seconds: float = Field(default=2.0, gt=0, le=120)
    """How often agents send a heartbeat at least."""
    replace_after_seconds: float = Field(default=30.0, ge=0, le=86_400)
    """How long after its lease a silent node's replicas are started elsewhere."""


class ControllerSettings(Settings):
    """Everything that a controller is told."""

    name: str = "controller-0"
    """Name of this process, for people."""
    cluster: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,63}$")] = "default"
    """Name of the cluster; part of NATS subjects and of the state store's keys."""
    grpc: ListenSettings = ListenSettings()
    """Where agents, routers, KV masters and people connect."""
    advertised_address: Annotated[str, StringConstraints(max_length=300)] = ""
    """`host:port` by which other controllers reach this one; where it listens when absent."""
    tls_ca_file: Path | None = None
    """PEM of the authorities that sign the certificates of workers and other controllers; plain text without it."""
    controller_tls_ca_file: Path | None = None
    """PEM of the authorities that sign the other controllers' certificates; `tls_ca_file` when absent."""
    join_token_file: Path | None = None
    """File with a secret that agents must show to register; for a mesh without client certificates."""
    store: StoreSettings = StoreSettings()
    """Where the state lies."""
    registry: RegistrySettings = RegistrySettings()
    """Nodes."""
    leader_lease_seconds: float = Field(default=3.0, ge=0.5, le=60)
    """How long a dead leader holds up its successor."""
    telemetry: TelemetrySettings = TelemetrySettings()
    """Logs and the admin server."""

    @field_validator("advertised_address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if value:
            split_address(value)
        return value
