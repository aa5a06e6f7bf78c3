"""Settings of the router."""

import json
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from kvist import _core
from kvist.errors import from_core
from kvist.settings import BusSettings, DoorSettings, Settings, TelemetrySettings, check_plain_text, split_address


class UpstreamSettings(Settings):
    """An OpenAI-compatible server outside the mesh."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,63}$")]
    """Its name in metrics and logs."""
    url: Annotated[str, StringConstraints(pattern=r"^https?://[^?#@]+$")]
    """Where its API begins, such as `https://api.example.com/v1`."""
    models: dict[Annotated[str, StringConstraints(min_length=1)], Annotated[str, StringConstraints(min_length=1)]] = (
        Field(min_length=1)
    )
    """The models that it serves: by the name that clients say, the name that it knows."""
    api_key_file: Path | None = None
    """File with its key, which is sent as a bearer; read again when it changes."""
    tls_ca_file: Path | None = None
    """PEM of the authorities that sign its certificate; the system's without it."""
    connect_timeout_seconds: float = Field(default=30.0, gt=0, le=3_600)
    """Time for a connection."""


class RouterSettings(DoorSettings):
    """Everything that a router is told."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,63}$")] = "router-0"
    """Name of this router, unique in the cluster; each request id begins with it."""
    http_listen: str = "127.0.0.1:0"
    """`host:port` of the OpenAI-compatible HTTP edge; port 0 takes a free one."""
    grpc_listen: str = "127.0.0.1:0"
    """`host:port` of the gRPC server; port 0 takes a free one."""
    tls_client_optional: bool = False
    """Let in gRPC clients without a certificate: they may ask models, as their API keys allow. One that is shown must
    be right."""
    http_tls_certificate_file: Path | None = None
    """PEM chain of the HTTP edge's certificate; that of the gRPC server when absent."""
    http_tls_key_file: Path | None = None
    """PEM key of that certificate."""
    http_tls_client_ca_file: Path | None = None
    """PEM of the authorities whose HTTP clients are let in; without it no client certificate is asked for."""
    tls_ca_file: Path | None = None
    """PEM of the authorities that sign the certificates of workers, KV masters and controllers; plain text without
    it."""
    controllers: tuple[str, ...] = ()
    """`host:port` of the controllers; tried in turn."""
    controller_tls_ca_file: Path | None = None
    """PEM of the authorities that sign the controllers' certificates; `tls_ca_file` when absent."""
    cluster_state_file: Path | None = None
    """A `ClusterState` as protobuf JSON instead of controllers; watched for changes."""
    last_state_file: Path | None = None
    """Where the last good cluster state is kept, so that a restart needs no controller."""
    remote_routers: tuple[str, ...] = ()
    """`host:port` of routers of other processes: this process is their HTTP edge, and no router itself."""
    remote_api_key_file: Path | None = None
    """File with the API key by which those routers know this edge; read again with each request."""
    bus: BusSettings = BusSettings()
    """Where KV events come from; without it the router follows each worker's ledger itself."""
    kvmasters: tuple[str, ...] = ()
    """`host:port` of KV masters, which a new router asks for the index before it asks every worker."""
    api_keys_file: Path | None = None
    """API keys, one a line: `name:sha256hex[:cache_salt]`. Without it everybody may ask."""
    index_byte_budget: int = Field(default=256 * 1024 * 1024, ge=1024 * 1024)
    """Most bytes of the index."""
    default_deadline_seconds: float = Field(default=600.0, gt=0, le=86_400)
    """Time a request may take when its client states none."""
    first_token_timeout_seconds: float = Field(default=300.0, ge=0, le=86_400)
    """Time from the placement of a request to its first token; 0 for no limit but the deadline."""
    token_timeout_seconds: float = Field(default=120.0, ge=0, le=86_400)
    """Time from a token to the next one; 0 for no limit but the deadline."""
    body_timeout_seconds: float = Field(default=60.0, gt=0, le=86_400)
    """Time for the body of a request, once its head has come."""
    write_timeout_seconds: float = Field(default=30.0, gt=0, le=86_400)
    """A client that takes nothing of its answer for so long loses the connection, or its stream of HTTP/2."""
    startup_wait_seconds: float = Field(default=5.0, ge=0, le=600)
    """For so long after the start, requests wait for the first target of their model instead of being refused."""
    cors_allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may ask from a browser, such as https://chat.example.com, or `*` for all; none when empty."""
    body_limit_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    """Largest HTTP body."""
    drain_seconds: float = Field(default=30.0, ge=0, le=3_600)
    """How long running requests may take when the process is asked to stop."""
    worker_threads: int | None = Field(default=None, ge=1, le=1_024)
    """Threads of the data plane; one for each processor when absent."""
    text_threads: int = Field(default=0, ge=0, le=1_024)
    """Threads that tokenize long prompts; 0 for half of the processors."""
    upstreams: tuple[UpstreamSettings, ...] = ()
    """OpenAI-compatible servers outside the mesh, as docs/guides/providers.md describes."""
    routing: dict[str, Any] = Field(default_factory=dict)
    """How targets are chosen for models whose resource does not say it: `{preset, filters, scorers, picker}` of
    docs/reference/algorithms.md. What is left out is the preset's."""
    admission: dict[str, Any] = Field(default_factory=dict)
    """How many requests of a model run and wait, for models whose resource does not say it: `{concurrency: {...}}` of
    docs/reference/modelservice.md. Everything is let in when it is empty."""
    telemetry: TelemetrySettings = TelemetrySettings()
    """Logs and the admin server."""

    @field_validator("http_listen", "grpc_listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        split_address(value)
        return value

    @field_validator("routing")
    @classmethod
    def _is_pipeline(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            _core.check_routing(json.dumps(value))
        except _core.CoreError as error:
            raise ValueError(from_core(error).message) from None
        return value

    @field_validator("admission")
    @classmethod
    def _is_admission(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            _core.check_admission(json.dumps(value or "allow_all"))
        except _core.CoreError as error:
            raise ValueError(from_core(error).message) from None
        return value

    @field_validator("upstreams")
    @classmethod
    def _are_distinct(cls, value: tuple[UpstreamSettings, ...]) -> tuple[UpstreamSettings, ...]:
        names = [upstream.name for upstream in value]
        if len(set(names)) < len(names):
            raise ValueError("two upstreams have the same name")
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if [bool(self.controllers), self.cluster_state_file is not None, self.is_edge_only].count(True) != 1:
            raise ValueError("give one of controllers, cluster_state_file and remote_routers")
        if self.remote_api_key_file is not None and not self.is_edge_only:
            raise ValueError("remote_api_key_file needs remote_routers")
        if (self.http_tls_certificate_file is None) != (self.http_tls_key_file is None):
            raise ValueError("http_tls_certificate_file and http_tls_key_file go together")
        if self.tls_client_optional and self.tls_client_ca_file is None:
            raise ValueError("tls_client_optional needs tls_client_ca_file")
        if self.http_tls_client_ca_file is not None and not self.serves_https:
            raise ValueError("http_tls_client_ca_file needs http_tls_certificate_file")
        if not self.is_edge_only:
            self.check_listen(self.grpc_listen)
        if not self.serves_https:
            check_plain_text(self.http_listen, insecure=self.insecure)
        return self

    @property
    def is_edge_only(self) -> bool:
        """Whether other processes route."""
        return bool(self.remote_routers)

    @property
    def serves_https(self) -> bool:
        """Whether the HTTP edge has a certificate."""
        return self.http_tls_certificate_file is not None or self.tls_certificate_file is not None

    def core_http_door(self) -> dict[str, object]:
        """What the HTTP edge is told of its door."""
        is_own = self.http_tls_certificate_file is not None
        files = {
            "tls_certificate_file": self.http_tls_certificate_file if is_own else self.tls_certificate_file,
            "tls_key_file": self.http_tls_key_file if is_own else self.tls_key_file,
            "tls_client_ca_file": self.http_tls_client_ca_file,
        }
        return {name: str(path) for name, path in files.items() if path is not None}
