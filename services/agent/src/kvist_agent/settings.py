"""Settings of the agent."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from kvist.settings import BusSettings, ListenSettings, Settings, TelemetrySettings


class WorkerSettings(Settings):
    """How workers are started and ended."""

    command: tuple[str, ...] = ()
    """Program and first arguments; this Python with `-m kvist_worker` when empty."""
    engines: tuple[str, ...] = ()
    """Engine adapters that this node offers; those that are installed when empty."""
    stop_on_exit: bool = False
    """End all workers when the agent is asked to stop. Without it they outlive the agent, which re-attaches."""


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
    controller_tls_ca_file: Path | None = None
    """PEM of the authorities that sign the controllers' certificates; plain text without it."""
    grpc: ListenSettings = ListenSettings()
    """Where the agent's own gRPC server listens."""
    advertised_host: Annotated[str, StringConstraints(max_length=253)] = ""
    """Host that others reach this node by; that of `grpc.listen` when empty."""
    bus: BusSettings = BusSettings()
    """Where KV events and tombstones go."""
    workers: WorkerSettings = WorkerSettings()
    """How workers are started and ended."""
    telemetry: TelemetrySettings = TelemetrySettings()
    """Logs and the admin server."""
