"""The pools of a model service: replicas that play one role, and how prefill and decode pools go together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from kvist.engine.v1.engine_pb2 import (
    ROLE_AGGREGATE,
    ROLE_DECODE,
    ROLE_PREFILL,
    TRANSFER_FAILURE_POLICY_FAIL,
    TRANSFER_FAILURE_POLICY_RECOMPUTE,
    TRANSFER_PROTOCOL_RDMA,
    TRANSFER_PROTOCOL_TCP,
    TRANSFER_PROTOCOL_UNSPECIFIED,
    HandOver,
    Role,
)
from kvist_controller.hand_over import CONNECTORS, EXAMPLE, NETWORKED, KvDivision
from kvist_controller.section import DurationSeconds, Section

MAX_REPLICAS = 1_000
MAX_POOLS = 32
RoleName = Literal["aggregate", "prefill", "decode"]
_ROLES: Mapping[str, Role.ValueType] = {"aggregate": ROLE_AGGREGATE, "prefill": ROLE_PREFILL, "decode": ROLE_DECODE}
_PROTOCOLS = {"rdma": TRANSFER_PROTOCOL_RDMA, "tcp": TRANSFER_PROTOCOL_TCP, None: TRANSFER_PROTOCOL_UNSPECIFIED}
_POLICIES = {"recompute": TRANSFER_FAILURE_POLICY_RECOMPUTE, "fail": TRANSFER_FAILURE_POLICY_FAIL}


class PoolSpec(Section):
    """Replicas that play one role."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]
    role: RoleName
    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    engine_args: dict[str, Any] | None = None
    """Replaces the service's `engine.arguments` as a whole; these when absent."""

    @property
    def wire_role(self) -> Role.ValueType:
        """The role as the protocol names it."""
        return _ROLES[self.role]


class KvTransferSpec(Section):
    """How prefill workers hand KV to decode workers."""

    connector: str
    protocol: Literal["rdma", "tcp"] | None = None
    """What carries the KV; `rdma` where the connector speaks over a network. TCP has to be written."""
    shared_folder: str | None = None
    """Of all workers of the service, for connectors that go through files."""
    rdma_device: str | None = None
    """Such as `mlx5_0`; any when absent."""
    lease: Annotated[DurationSeconds, Field(gt=0)] = 30.0
    """How long a prefill worker keeps blocks for a decode worker that does not come."""
    on_failure: Literal["recompute", "fail"] = "recompute"
    """What a decode worker does when the KV does not arrive."""
    prefill_from_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 512
    """Uncached prompt tokens from which on a prefill worker computes the prompt."""

    @property
    def effective_protocol(self) -> str | None:
        """What carries the KV; none for files."""
        return (self.protocol or "rdma") if self.connector in NETWORKED else None

    def to_wire(self) -> HandOver:
        """As workers and routers are told."""
        wire = HandOver(
            connector=self.connector,
            protocol=_PROTOCOLS[self.effective_protocol],
            shared_folder=self.shared_folder or "",
            rdma_device=self.rdma_device or "",
            on_failure=_POLICIES[self.on_failure],
            prefill_from_tokens=self.prefill_from_tokens,
        )
        wire.lease_duration.FromNanoseconds(round(self.lease * 1e9))
        return wire

    @model_validator(mode="after")
    def _fits_its_connector(self) -> Self:
        if (self.connector == EXAMPLE) != (self.shared_folder is not None):
            raise ValueError(f"sharedFolder belongs to {EXAMPLE}, which needs it")
        if self.connector not in NETWORKED and self.protocol is not None:
            raise ValueError(f"{self.connector} goes through files: it has no protocol")
        if self.rdma_device is not None and self.effective_protocol != "rdma":
            raise ValueError("rdmaDevice belongs to protocol rdma")
        return self


def problems(
    pools: Sequence[PoolSpec], transfer: KvTransferSpec | None, *, engine: str, arguments: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """What is wrong with the pools of a service together: field below `spec`, and why."""
    if not pools:
        if transfer is not None:
            yield "kvTransfer", "belongs to prefill and decode pools, of which there are none"
        return
    if len({pool.name for pool in pools}) != len(pools):
        yield "pools", "a name is given more than once"
    roles = {pool.role for pool in pools}
    if "aggregate" in roles and len(roles) > 1:
        yield "pools", "a service has aggregate pools alone, or prefill and decode pools"
    elif roles in ({"prefill"}, {"decode"}):
        present = next(iter(roles))
        missing = "decode" if present == "prefill" else "prefill"
        yield "pools", f"incomplete P/D: there is a {present} pool and no {missing} pool"
    divided = "prefill" in roles or "decode" in roles
    if not divided:
        if transfer is not None:
            yield "kvTransfer", "belongs to prefill and decode pools, of which there are none"
        return
    known = CONNECTORS[engine]
    if not known:
        yield "pools", f"the engine {engine} cannot hand KV over"
    elif transfer is None:
        yield "kvTransfer", f"is required with prefill and decode pools: connector is one of {', '.join(known)}"
    elif transfer.connector not in known:
        yield "kvTransfer.connector", f"must be one of {', '.join(known)} with the engine {engine}"
    elif engine == "sim" and transfer.effective_protocol != "tcp":
        yield "kvTransfer.protocol", "must be written as tcp: the simulated engine knows no other"
    for index, pool in enumerate(pools):
        if pool.role != "prefill":
            continue
        own = KvDivision.of_arguments(_arguments(pool, arguments))
        for other in pools:
            if other.role != "decode":
                continue
            why = own.difference(KvDivision.of_arguments(_arguments(other, arguments)))
            if why:
                yield f"pools[{index}]", f"cannot hand KV to the pool {other.name!r}: {why}"


def _arguments(pool: PoolSpec, of_service: Mapping[str, Any]) -> Mapping[str, Any]:
    return of_service if pool.engine_args is None else pool.engine_args
