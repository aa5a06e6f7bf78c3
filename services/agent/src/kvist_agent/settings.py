"""Settings of the agent."""

import ipaddress
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from kvist.settings import (
    BusSettings,
    DoorSettings,
    ListenSettings,
    Settings,
    TelemetrySettings,
    join_address,
    name_of_address,
)
from kvist_agent.attach_settings import AttachSettings


class WorkerSettings(DoorSettings):
    """How workers are started and ended, and the doors of their servers."""

    command: tuple[str, ...] = ()
    """Program and first arguments; this Python with `-m kvist_worker` when empty."""
    engines: tuple[str, ...] = ()
    """Engine adapters that this node offers; those that are installed when empty."""
    stop_on_exit: bool = False
    """End all workers when the agent is asked to stop. Without it they outlive the agent, which re-attaches."""

    listen_host: str = "127.0.0.1"
    """IP address that workers listen at; off loopback, routers on other nodes reach them."""
    liveness_interval_seconds: float = Field(default=5.0, gt=0, le=3_600)
    """How often a ready worker is asked whether it lives."""
    liveness_time_limit_seconds: float = Field(default=5.0, gt=0, le=3_600)
    """How long its answer may take."""
    liveness_failures: int = Field(default=3, ge=1, le=1_000)
    """After so many questions in a row without an answer it is killed and started again."""

    @field_validator("listen_host")
    @classmethod
    def _is_host(cls, value: str) -> str:
        ipaddress.ip_address(value)
        return value

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        self.check_listen(self.listen)
        return self

    @property
    def liveness_limit_seconds(self) -> float:
        """How long a worker may be silent before it counts as frozen."""
        return self.liveness_failures * (self.liveness_interval_seconds + self.liveness_time_limit_seconds)

    @property
    def listen(self) -> str:
        """`host:port` that a worker is told to listen at: any free port of the host."""
        return join_address(self.listen_host, 0)


class AgentSettings(Settings):
    """Everything that an agent is told."""

    node_name: str = ""
    """Name of the node; the host's name when empty."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Free-form labels for placement."""
    state_folder: Path = Path("kvist-agent")
    """Where the agent keeps its identity and what it knows of its workers."""
    controllers: Annotated[tuple[str, ...], Field(min_length=1)] = ("127.0.0.1:7100",)
    """`host:port` of the controllers; tried in turn."""
    tls_ca_file: Path | None = None
    """PEM of the authorities that sign the certificates of workers and controllers; plain text without it."""
    controller_tls_ca_file: Path | None = None
    """PEM of the authorities that sign the controllers' certificates; `tls_ca_file` when absent."""
    join_token_file: Path | None = None
    """File with the secret that the controllers ask agents for, where there are no client certificates."""
    grpc: ListenSettings = ListenSettings()
    """Where the agent's own gRPC server listens."""
    advertised_host: Annotated[str, StringConstraints(max_length=253)] = ""
    """Host that others reach this node and its workers by; that of each listener when empty."""
    advertised_domain: Annotated[str, StringConstraints(max_length=200)] = ""
    """Domain below which DNS knows `advertised_host`, an IP address then, as `10-0-0-7.DOMAIN`: what certificates can
    name."""
    bus: BusSettings = BusSettings()
    """Where KV events and tombstones go."""
    attach: tuple[AttachSettings, ...] = ()
    """Engines that run already, and whose KV events this agent reads."""
    workers: WorkerSettings = WorkerSettings()
    """How workers are started and ended."""
    telemetry: TelemetrySettings = TelemetrySettings()
    """Logs and the admin server."""

    @field_validator("attach")
    @classmethod
    def _have_names_of_their_own(cls, value: tuple[AttachSettings, ...]) -> tuple[AttachSettings, ...]:
        names = [engine.name for engine in value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two engines are called {name!r}: a name is the engine's identity on this node")
        return value

    @model_validator(mode="after")
    def _is_reachable(self) -> Self:
        if self.workers.tls_certificate_file is not None and self.tls_ca_file is None:
            raise ValueError("workers.tls_certificate_file needs tls_ca_file: this agent calls its workers too")
        if not self.advertised_host and ipaddress.ip_address(self.workers.listen_host).is_unspecified:
            raise ValueError(
                f"workers.listen_host {self.workers.listen_host} is no address to reach workers by: set advertised_host"
            )
        if self.advertised_domain:
            name_of_address(self.advertised_host, domain=self.advertised_domain)
        return self

    @property
    def reached_as(self) -> str:
        """Host that others reach this node by; empty for that of each listener."""
        if self.advertised_domain:
            return name_of_address(self.advertised_host, domain=self.advertised_domain)
        return self.advertised_host
