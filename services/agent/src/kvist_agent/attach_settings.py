"""Settings of an engine that runs already and whose KV events the agent reads."""

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from kvist.settings import Settings, split_address

TCP, IPC = "tcp://", "ipc://"
LARGEST_PORT = 65_535

Medium = Literal["device", "host", "disk", "external", "hint"]


class AttachSettings(Settings):
    """One engine that Kvist did not start: a vLLM server with `--kv-events-config`."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
    """Its name on this node: lower-case letters, digits and '-'."""
    model: Annotated[str, StringConstraints(min_length=1)]
    """Name of the model that it serves, as a `ModelService` names it."""
    namespace: str = ""
    """Namespace of its block hashes; the model's name when empty. Workers of one model share it."""
    events_endpoint: str
    """Its PUB socket, such as `tcp://10.0.0.7:5557`, or `ipc://` and a path; that of the first rank when there are
    several, whose ports count up by one."""
    replay_endpoint: str
    """Its replay socket, likewise. Not optional: without it a lost removal would stay unknown."""
    topic: str = ""
    """Beginning of the topics that are read; everything when empty."""
    ranks: int = Field(default=1, ge=1, le=1_024)
    """Data-parallel ranks."""
    first_rank: int = Field(default=0, ge=0, le=65_535)
    """The number by which the engine calls the first of them."""
    block_size_tokens: int = Field(ge=1, le=65_536)
    """Tokens a block of its ledger: the hash unit of the model's pool. The engine's own block is a multiple of it."""
    hash_algorithm: Literal["", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] = ""
    """Its `--prefix-caching-hash-algo`. A sample of its hashes is recomputed where they are reproducible: `sha256_cbor`
    and, without salts, `sha256`. Nothing is checked when empty."""
    python_hash_seed: str | None = None
    """Its `PYTHONHASHSEED`, if it has one."""
    plain_requests_only: bool = False
    """Vouches that nobody sends it salts, images or embeddings. Only for versions that do not state them, whose blocks
    are left out otherwise."""
    may_repeat: bool = True
    """Whether requests may ask it to report what it holds already. Say no only where none can."""
    adapters: dict[int, str] = Field(default_factory=dict)
    """Names of adapters by the number that older versions send instead."""
    media: dict[str, Medium] = Field(default_factory=dict)
    """What further media stand for, by the name that the engine gives them; a medium that never reports removals is
    a `hint`, as is one that is not named here. Known are gpu (device), cpu (host) and storage (disk)."""
    idle_interval_seconds: float = Field(default=2.0, gt=0, le=3_600)
    """After so long without news the last batch is asked for."""

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        for name in ("events_endpoint", "replay_endpoint"):
            reason = _wrong_with(getattr(self, name), ranks=self.ranks)
            if reason:
                raise ValueError(f"{name} {getattr(self, name)!r} {reason}")
        if self.events_endpoint == self.replay_endpoint:
            raise ValueError("replay_endpoint is the events endpoint: the engine needs one for each")
        return self


def _wrong_with(endpoint: str, *, ranks: int) -> str:
    """Why an endpoint cannot be read; empty when it can."""
    if endpoint.startswith(IPC):
        if endpoint == IPC:
            return "has no path"
        return "must be tcp:// for several ranks, whose ports count up" if ranks > 1 else ""
    if not endpoint.startswith(TCP):
        return "is neither tcp://host:port nor ipc://path"
    try:
        host, port = split_address(endpoint.removeprefix(TCP))
    except ValueError as error:
        return str(error)
    if host == "*":
        return "is what the engine binds: name the host that it runs on"
    if port == 0:
        return "must name the port that the engine listens at"
    return "leaves no ports for all ranks" if port + ranks - 1 > LARGEST_PORT else ""
