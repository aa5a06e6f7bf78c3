"""Settings of the controller."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from kvist.settings import (
    ListenSettings,
    Settings,
    StoreSettings,
    TelemetrySettings,
    join_address,
    name_of_address,
    split_address,
)


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
    advertised_domain: Annotated[str, StringConstraints(max_length=200)] = ""
    """Domain below which DNS knows the host of `advertised_address`, an IP address then, as `10-0-0-7.DOMAIN`: what
    certificates can name."""
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

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if self.advertised_domain:
            name_of_address(split_address(self.advertised_address)[0], domain=self.advertised_domain)
        return self

    @property
    def reached_as(self) -> str:
        """`host:port` by which other controllers reach this one; empty for where it listens."""
        if not self.advertised_domain:
            return self.advertised_address
        host, port = split_address(self.advertised_address)
        return join_address(name_of_address(host, domain=self.advertised_domain), port)

    @field_validator("advertised_address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if value:
            split_address(value)
        return value
