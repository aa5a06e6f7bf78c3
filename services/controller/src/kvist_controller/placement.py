"""What to start and what to end so that a model service becomes what its resource says. Pure: no clock, no I/O."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

# One more worker than wanted may run while a rollout replaces workers, so that none is missed meanwhile.
ROLLOUT_SURGE = 1


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as placement sees it.

    Attributes:
        uid: UID of the node.
        engines: Engine adapters that can start on it.
        slots: Worker slots of all model services that it has.
        processors: Logical processors; a tie of slots a processor goes to the larger node.
    """

    uid: str
    engines: frozenset[str]
    slots: int
    processors: int


@dataclass(frozen=True, slots=True)
class SlotView:
    """A worker slot as placement sees it.

    Attributes:
        uid: UID of the slot.
        ordinal: Position within its model service; the highest are drained first.
        node_uid: Where it is.
        revision: Pool revision it runs.
        is_ready: Whether routers may use it.
        is_draining: Whether its end has been decided.
        is_lost: Whether its node has been silent for so long that it shall be replaced.
    """

    uid: str
    ordinal: int
    node_uid: str
    revision: str
    is_ready: bool
    is_draining: bool = False
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A worker slot to start."""

    ordinal: int
    node_uid: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The next steps of one model service.

    Attributes:
        create: Slots to start.
        drain: UIDs of slots to drain and end.
        unplaced: Replicas that no present node can take.
    """

    create: tuple[NewSlot, ...] = ()
    drain: tuple[str, ...] = ()
    unplaced: int = 0


def plan(*, desired: int, revision: str, engine: str, slots: Sequence[SlotView], nodes: Collection[NodeView]) -> Plan:
    """Decides the next steps of one model service.

    Workers of older revisions go one for each ready worker of the present one, so that `desired` workers serve
    throughout a rollout; those that serve nothing go at once. Slots on lost nodes do not count and are dropped as soon
    as their replacement has a place.
    """
    active = [slot for slot in slots if not slot.is_draining]
    lost = [slot for slot in active if slot.is_lost]
    current = sorted((s for s in active if s.revision == revision and not s.is_lost), key=_by_ordinal)
    old = sorted((s for s in active if s.revision != revision and not s.is_lost), key=_by_ordinal)

    drain = [slot.uid for slot in current[desired:]]
    current = current[:desired]
    ready_current = sum(slot.is_ready for slot in current)
    ready_old = [slot for slot in old if slot.is_ready]
    kept_old = ready_old[: max(0, desired - ready_current)]
    drain += [slot.uid for slot in old if slot not in kept_old]

    missing = max(0, desired - len(current))
    room = desired + ROLLOUT_SURGE - len(current) - len(kept_old) if kept_old else missing
    wanted = max(0, min(missing, room))
    taken = {slot.ordinal for slot in slots}
    create = _place(wanted, engine=engine, taken=taken, slots=[*current, *kept_old], nodes=nodes)
    # A lost slot is given up only for a replacement or because it is not wanted: its node may come back.
    surplus_lost = max(0, len(lost) - (desired - len(current) - len(create)))
    drain += [slot.uid for slot in sorted(lost, key=_by_ordinal, reverse=True)[:surplus_lost]]
    return Plan(create=tuple(create), drain=tuple(drain), unplaced=wanted - len(create))


def _place(
    count: int, *, engine: str, taken: set[int], slots: Sequence[SlotView], nodes: Collection[NodeView]
) -> list[NewSlot]:
    """Spreads new slots: fewest of this service first, then fewest slots for each processor, then by UID."""
    candidates = [node for node in nodes if engine in node.engines]
    own = {node.uid: sum(slot.node_uid == node.uid for slot in slots) for node in candidates}
    total = {node.uid: node.slots for node in candidates}
    ordinals = _free_ordinals(taken)
    created: list[NewSlot] = []
    if not candidates:
        return created

    def load(node: NodeView) -> tuple[int, float, int, str]:
        return own[node.uid], total[node.uid] / max(1, node.processors), -node.processors, node.uid

    for _ in range(count):
        chosen = min(candidates, key=load)
        own[chosen.uid] += 1
        total[chosen.uid] += 1
        created.append(NewSlot(ordinal=ordinals(), node_uid=chosen.uid))
    return created


def _free_ordinals(taken: set[int]) -> Callable[[], int]:
    used = set(taken)

    def next_free() -> int:
        ordinal = 0
        while ordinal in used:
            ordinal += 1
        used.add(ordinal)
        return ordinal

    return next_free


def _by_ordinal(slot: SlotView) -> int:
    return slot.ordinal
