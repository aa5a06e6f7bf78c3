"""What the controller knows of nodes and worker slots, and what it concludes from what agents say.

Synchronous and without a clock of its own: each method takes what happened and when, changes the memory, and puts the
records that changed into `pending`, from where the controller writes them under its fence.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvist.agent.v1.agent_pb2 import (
    WORKER_PHASE_READY,
    WORKER_PHASE_REFUSED,
    WORKER_PHASE_STOPPED,
    AttachedEngine,
    NodeLoad,
    WorkerStatus,
)
from kvist.controller.v1.controller_pb2 import AgentHello, NodeEntry, WorkerVerdict
from kvist_controller.placement import NodeView, SlotView
from kvist_controller.presence import Presence
from kvist_controller.records import Keys, NodeRecord, SlotRecord, encode_contract
from kvist_controller.verdict import PoolContract, Verdict, judge

# Tombstones are repeated in the cluster state for this long, so that a router that was away learns of them.
DEATH_RETENTION_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Death:
    """A death that an agent announced.

    Attributes:
        incarnation: All incarnations up to this one are closed.
        noted_at_seconds: When it was first heard of.
    """

    incarnation: int
    noted_at_seconds: float


@dataclass(slots=True)
class _NodeNews:
    load: NodeLoad | None = None
    heard_at_unix_seconds: float = 0.0
    # Workers that were started for another store.
    strange_workers: frozenset[str] = frozenset()


class Fleet:
    """Nodes, worker slots, verdicts, deaths."""

    def __init__(self, *, keys: Keys, hash_seed: int, presence: Presence) -> None:
        self.nodes: dict[str, NodeRecord] = {}
        self.slots: dict[str, SlotRecord] = {}
        self.contracts: dict[tuple[str, str], PoolContract] = {}
        self.deaths: dict[str, Death] = {}
        # By node. Not stored by itself: the published cluster state has them, and each heartbeat states them.
        self.attached: dict[str, list[AttachedEngine]] = {}
        self.pending: dict[str, bytes | None] = {}
        self.presence = presence
        self._keys = keys
        self._hash_seed = hash_seed
        self._news: dict[str, _NodeNews] = {}

    # What happens.

    def hello(self, hello: AgentHello, *, now_seconds: float, now_unix_seconds: float) -> None:
        """An agent has introduced its node."""
        node = NodeRecord(hello.inventory, hello.address, hello.admin_address)
        if self.nodes.get(node.uid) != node:
            self.nodes[node.uid] = node
            self.pending[f"{self._keys.nodes}{node.uid}"] = node.encode()
        self.heartbeat(node.uid, hello.workers, load=None, now_seconds=now_seconds, now_unix_seconds=now_unix_seconds)

    def heartbeat(
        self,
        node_uid: str,
        statuses: Iterable[WorkerStatus],
        *,
        load: NodeLoad | None,
        now_seconds: float,
        now_unix_seconds: float,
    ) -> None:
        """An agent has stated all workers of its node."""
        self.presence.heard(node_uid, now_seconds=now_seconds)
        news = self._news.setdefault(node_uid, _NodeNews())
        news.heard_at_unix_seconds = now_unix_seconds
        if load is not None:
            news.load = load
        stated = {status.spec.worker_uid: status for status in statuses}
        news.strange_workers = frozenset(
            uid for uid, status in stated.items() if uid not in self.slots and status.spec.hash_seed != self._hash_seed
        )
        for slot in [slot for slot in self.slots.values() if slot.node_uid == node_uid]:
            status = stated.get(slot.uid)
            if status is not None and status.dead_incarnation:
                self._note_death(slot.uid, status.dead_incarnation, now_seconds=now_seconds)
            is_gone = status is None or status.phase == WORKER_PHASE_STOPPED
            if slot.is_draining and is_gone:
                self._close(slot, now_seconds=now_seconds)
                self.drop_slot(slot.uid)
            elif status is None:
                # An agent that knew the slot and does not any more has lost its files; the assignment starts it anew.
                self.put_slot(replace(slot, status=None, verdict=None))
            else:
                self._take_status(slot, status)

    def attach(self, node_uid: str, engines: Iterable[AttachedEngine]) -> bool:
        """An agent has stated the engines that it has attached; returns whether that is news."""
        stated = list(engines)
        if self.attached.get(node_uid, []) == stated:
            return False
        self.attached[node_uid] = stated
        return True

    def _take_status(self, slot: SlotRecord, status: WorkerStatus) -> None:
        verdict = slot.verdict
        if status.HasField("description"):
            if verdict is None or verdict.incarnation != status.description.incarnation:
                verdict = self._judge(slot, status)
        else:
            verdict = None
        self.put_slot(replace(slot, status=status, verdict=verdict))

    def _judge(self, slot: SlotRecord, status: WorkerStatus) -> Verdict:
        key = (slot.spec.pool_uid, slot.spec.pool_revision)
        contract = self.contracts.get(key, PoolContract())
        verdict, completed = judge(status.description, spec=slot.spec, hash_seed=self._hash_seed, contract=contract)
        if completed != contract:
            self.put_contract(*key, completed)
        return verdict

    def _note_death(self, worker_uid: str, incarnation: int, *, now_seconds: float) -> None:
        known = self.deaths.get(worker_uid)
        if known is None or incarnation > known.incarnation:
            self.deaths[worker_uid] = Death(incarnation, now_seconds)

    def _close(self, slot: SlotRecord, *, now_seconds: float) -> None:
        """The end of a drained slot is a death like another: its agent says that the process has ended."""
        if slot.status is not None and slot.status.description.incarnation:
            self._note_death(slot.uid, slot.status.description.incarnation, now_seconds=now_seconds)

    # What is changed.

    def put_slot(self, slot: SlotRecord) -> None:
        """Stores a slot when it has changed."""
        if self.slots.get(slot.uid) != slot:
            self.slots[slot.uid] = slot
            self.pending[f"{self._keys.workers}{slot.uid}"] = slot.encode()

    def drop_slot(self, worker_uid: str) -> None:
        """Forgets a slot."""
        if self.slots.pop(worker_uid, None) is not None:
            self.pending[f"{self._keys.workers}{worker_uid}"] = None

    def put_contract(self, pool_uid: str, revision: str, contract: PoolContract) -> None:
        """Fixes what the workers of a pool revision share."""
        self.contracts[pool_uid, revision] = contract
        self.pending[self._keys.contract(pool_uid, revision)] = encode_contract(contract)

    def drop_contract(self, pool_uid: str, revision: str) -> None:
        """Forgets a pool revision that nobody runs."""
        if self.contracts.pop((pool_uid, revision), None) is not None:
            self.pending[self._keys.contract(pool_uid, revision)] = None

    def drop_node(self, node_uid: str) -> None:
        """Forgets a node."""
        if self.nodes.pop(node_uid, None) is not None:
            self.presence.forget(node_uid)
            self.attached.pop(node_uid, None)
            self._news.pop(node_uid, None)
            self.pending[f"{self._keys.nodes}{node_uid}"] = None

    def prune_deaths(self, *, now_seconds: float) -> None:
        """Forgets deaths of slots that are gone, when they are old."""
        for uid, death in list(self.deaths.items()):
            if uid not in self.slots and now_seconds - death.noted_at_seconds >= DEATH_RETENTION_SECONDS:
                del self.deaths[uid]

    # What is seen.

    def is_heard(self, node_uid: str) -> bool:
        """Whether the node's agent has stated its workers to this leader."""
        return node_uid in self._news

    def strange_workers(self, node_uid: str) -> frozenset[str]:
        """Workers of a node that were started for a store with another hash seed."""
        news = self._news.get(node_uid)
        return frozenset() if news is None else news.strange_workers

    def dead_incarnations(self) -> Mapping[str, int]:
        """Closed incarnations by worker UID."""
        return {uid: death.incarnation for uid, death in self.deaths.items()}

    def slots_of(self, service_uid: str) -> Sequence[SlotRecord]:
        """Slots of a model service."""
        return [slot for slot in self.slots.values() if slot.service_uid == service_uid]

    def slot_view(self, slot: SlotRecord, *, is_ready: bool, now_seconds: float) -> SlotView:
        """A slot as placement sees it."""
        return SlotView(
            uid=slot.uid,
            ordinal=slot.ordinal,
            node_uid=slot.node_uid,
            revision=slot.spec.pool_revision,
            is_ready=is_ready,
            is_draining=slot.is_draining,
            is_lost=self.presence.is_lost(slot.node_uid, now_seconds=now_seconds),
        )

    def attached_engines(self, *, now_seconds: float) -> list[tuple[str, AttachedEngine]]:
        """The attached engines of nodes that are not lost, each with its node."""
        return [
            (node_uid, engine)
            for node_uid, engines in self.attached.items()
            if not self.presence.is_lost(node_uid, now_seconds=now_seconds)
            for engine in engines
        ]

    def node_views(self, *, now_seconds: float) -> list[NodeView]:
        """The present nodes as placement sees them."""
        return [
            NodeView(
                uid=node.uid,
                engines=frozenset(node.inventory.engines),
                slots=sum(slot.node_uid == node.uid for slot in self.slots.values()),
                processors=node.inventory.processors,
            )
            for node in self.nodes.values()
            if self.presence.is_present(node.uid, now_seconds=now_seconds)
        ]

    def verdicts(self, node_uid: str) -> list[WorkerVerdict]:
        """What the workers of a node are told about themselves."""
        return [
            WorkerVerdict(
                worker_uid=slot.uid,
                incarnation=slot.verdict.incarnation,
                refused_reason=slot.verdict.refused_reason,
                warnings=slot.verdict.warnings,
            )
            for slot in sorted(self.slots.values(), key=lambda slot: slot.uid)
            if slot.node_uid == node_uid and slot.verdict is not None
        ]

    def node_entries(self, *, now_seconds: float) -> list[NodeEntry]:
        """All nodes with their workers, for people."""
        entries = []
        for node in sorted(self.nodes.values(), key=lambda node: (node.inventory.name, node.uid)):
            entry = NodeEntry(
                inventory=node.inventory,
                address=node.address,
                present=self.presence.is_present(node.uid, now_seconds=now_seconds),
                workers=[
                    status_with_verdict(slot)
                    for slot in sorted(self.slots.values(), key=lambda slot: slot.uid)
                    if slot.node_uid == node.uid
                ],
                attached=self.attached.get(node.uid, []),
            )
            news = self._news.get(node.uid)
            if news is not None:
                if news.load is not None:
                    entry.load.CopyFrom(news.load)
                entry.heard_at.FromNanoseconds(int(news.heard_at_unix_seconds * 1e9))
            entries.append(entry)
        return entries


def status_with_verdict(slot: SlotRecord) -> WorkerStatus:
    """A worker's status as its agent stated it, with what the controller thinks of it."""
    status = WorkerStatus()
    if slot.status is None:
        status.spec.CopyFrom(slot.spec)
        status.message = "not yet stated by its agent"
        return status
    status.CopyFrom(slot.status)
    verdict = slot.verdict
    if verdict is not None and status.phase == WORKER_PHASE_READY:
        if not verdict.is_accepted:
            status.phase = WORKER_PHASE_REFUSED
            status.message = verdict.refused_reason
        elif verdict.warnings:
            status.message = "; ".join(filter(None, (status.message, *verdict.warnings)))
    return status
