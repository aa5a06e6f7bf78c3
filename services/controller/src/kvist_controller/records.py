"""What the controller keeps in the state store, and under which keys.

```
/kvist/<cluster>/v1/
  elections/controller            LeaderRecord of the controller that leads
  settings/hash_seed              made once
  settings/cluster_state          the last published cluster state; its revision is the state's version
  resources/<kind>/<name>         ServiceRecord
  nodes/<node uid>                NodeRecord
  workers/<worker uid>            SlotRecord
  contracts/<pool uid>/<revision> PoolContract
```
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from google.protobuf import json_format

from kvist.agent.v1.agent_pb2 import NodeInventory, WorkerSpec, WorkerStatus
from kvist_controller.verdict import PoolContract, Verdict


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """Who leads, as the election's key says.

    Attributes:
        name: Name of the process, for people.
        address: `host:port` where other controllers reach it.
    """

    name: str
    address: str

    def encode(self) -> str:
        """As stored."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """As it was stored; an older controller wrote its name alone, and cannot be reached by others."""
        try:
            return cls(**json.loads(value))
        except ValueError:
            return cls(value.decode(errors="replace"), "")


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """A `ModelService` as stored.

    Attributes:
        name: Name of the resource.
        uid: Another one after deletion and new creation.
        generation: Grows with each change of the specification.
        created_at_unix_nanos: When it was made.
        deleted_at_unix_nanos: When its deletion was asked for; none while it shall exist.
        labels: For selection.
        annotations: For tools.
        spec: Checked specification with all defaults, as people write it.
        status: As the controller states it.
        resource_version: Store revision of the last change; not part of the value.
    """

    name: str
    uid: str
    generation: int
    created_at_unix_nanos: int
    spec: Mapping[str, Any]
    deleted_at_unix_nanos: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    resource_version: int = 0

    def encode(self) -> bytes:
        """As stored."""
        value = asdict(self)
        del value["resource_version"]
        return _encode(value)

    @classmethod
    def decode(cls, value: bytes, *, resource_version: int) -> Self:
        """As it was stored."""
        return cls(**json.loads(value), resource_version=resource_version)


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node as stored.

    Attributes:
        inventory: What it is.
        address: `host:port` of its agent.
        admin_address: `host:port` of the agent's admin server.
    """

    inventory: NodeInventory
    address: str
    admin_address: str

    @property
    def uid(self) -> str:
        """UID of the node."""
        return self.inventory.node_uid

    def encode(self) -> bytes:
        """As stored."""
        return _encode(
            {
                "inventory": json_format.MessageToDict(self.inventory),
                "address": self.address,
                "admin_address": self.admin_address,
            }
        )

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """As it was stored."""
        plain = json.loads(value)
        return cls(
            inventory=json_format.ParseDict(plain["inventory"], NodeInventory(), ignore_unknown_fields=True),
            address=plain["address"],
            admin_address=plain["admin_address"],
        )


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """A worker slot as stored.

    Attributes:
        service_uid: UID of the model service it belongs to.
        ordinal: Position within the model service.
        node_uid: Where it is.
        spec: What it runs.
        is_draining: Whether its end was decided.
        status: As its agent last stated it; none before that.
        verdict: Whether its present start may take requests; none before it described itself.
    """

    service_uid: str
    ordinal: int
    node_uid: str
    spec: WorkerSpec
    is_draining: bool = False
    status: WorkerStatus | None = None
    verdict: Verdict | None = None

    @property
    def uid(self) -> str:
        """UID of the slot."""
        return self.spec.worker_uid

    def encode(self) -> bytes:
        """As stored."""
        return _encode(
            {
                "service_uid": self.service_uid,
                "ordinal": self.ordinal,
                "node_uid": self.node_uid,
                "spec": json_format.MessageToDict(self.spec),
                "is_draining": self.is_draining,
                "status": None if self.status is None else json_format.MessageToDict(self.status),
                "verdict": None if self.verdict is None else asdict(self.verdict),
            }
        )

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """As it was stored."""
        plain = json.loads(value)
        status, verdict = plain.pop("status"), plain.pop("verdict")
        spec = json_format.ParseDict(plain.pop("spec"), WorkerSpec(), ignore_unknown_fields=True)
        return cls(
            **plain,
            spec=spec,
            status=None
            if status is None
            else json_format.ParseDict(status, WorkerStatus(), ignore_unknown_fields=True),
            verdict=None if verdict is None else Verdict(**{**verdict, "warnings": tuple(verdict["warnings"])}),
        )


def encode_contract(contract: PoolContract) -> bytes:
    """As stored."""
    return _encode(asdict(contract))


def decode_contract(value: bytes) -> PoolContract:
    """As it was stored."""
    return PoolContract(**json.loads(value))


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one cluster."""

    cluster: str

    @property
    def root(self) -> str:
        """Everything of the cluster."""
        return f"/kvist/{self.cluster}/v1/"

    @property
    def election(self) -> str:
        """Who leads."""
        return f"{self.root}elections/controller"

    @property
    def hash_seed(self) -> str:
        """Seed of the block hashes."""
        return f"{self.root}settings/hash_seed"

    @property
    def cluster_state(self) -> str:
        """The last published cluster state."""
        return f"{self.root}settings/cluster_state"

    def resources(self, kind: str) -> str:
        """Prefix of a kind."""
        return f"{self.root}resources/{kind}/"

    def resource(self, kind: str, name: str) -> str:
        """One resource."""
        return f"{self.resources(kind)}{name}"

    @property
    def nodes(self) -> str:
        """Prefix of all nodes."""
        return f"{self.root}nodes/"

    @property
    def workers(self) -> str:
        """Prefix of all worker slots."""
        return f"{self.root}workers/"

    @property
    def contracts(self) -> str:
        """Prefix of all pool contracts."""
        return f"{self.root}contracts/"

    def contract(self, pool_uid: str, revision: str) -> str:
        """Contract of one pool revision."""
        return f"{self.contracts}{pool_uid}/{revision}"


def _encode(value: Mapping[str, Any]) -> bytes:
    # Sorted, so that equal records are equal bytes and no write is made for nothing.
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
