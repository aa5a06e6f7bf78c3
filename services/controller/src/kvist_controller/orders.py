"""What each node shall run, and which nodes are told nothing.

An agent ends what its assignment does not name. A store without any resource may be one that has lost them: a wrong
data folder, a restore from nothing. Workers that were started for another store, as their hash seed shows, say that
there were some. Until somebody has applied a resource, nodes with such workers get no orders: unknown is neutral.
"""

from dataclasses import dataclass

from kvist.agent.v1.agent_pb2 import WorkerSpec
from kvist.telemetry import logger
from kvist_controller.fleet import Fleet

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class NodeOrders:
    """What a node shall run.

    Attributes:
        number: Grows with each change; 0 before the first, of which no agent is told.
        workers: Specifications of all slots, by UID.
    """

    number: int = 0
    workers: tuple[WorkerSpec, ...] = ()


class Orders:
    """The orders of all nodes."""

    def __init__(self) -> None:
        self._by_node: dict[str, NodeOrders] = {}
        self._strangers: dict[str, frozenset[str]] = {}

    def of(self, node_uid: str) -> NodeOrders:
        """What a node shall run."""
        return self._by_node.get(node_uid, NodeOrders())

    @property
    def strange_workers(self) -> int:
        """Workers of another store that are left alone."""
        return sum(len(workers) for workers in self._strangers.values())

    def renew(self, fleet: Fleet, *, has_resources: bool) -> None:
        """Gives the orders that follow from the slots."""
        wanted: dict[str, list[WorkerSpec]] = {uid: [] for uid in fleet.nodes}
        for slot in sorted(fleet.slots.values(), key=lambda slot: slot.uid):
            if not slot.is_draining:
                wanted.setdefault(slot.node_uid, []).append(slot.spec)
        self._note_strangers({} if has_resources else {uid: fleet.strange_workers(uid) for uid in fleet.nodes})
        for node_uid, workers in wanted.items():
            # A node that this leader has not heard of may have such workers too.
            is_unknown = not has_resources and (node_uid in self._strangers or not fleet.is_heard(node_uid))
            if is_unknown and not workers:
                continue
            present = self.of(node_uid)
            if present.number == 0 or present.workers != tuple(workers):
                self._by_node[node_uid] = NodeOrders(present.number + 1, tuple(workers))

    def _note_strangers(self, by_node: dict[str, frozenset[str]]) -> None:
        kept = {uid: workers for uid, workers in by_node.items() if workers}
        for uid, workers in kept.items():
            if workers != self._strangers.get(uid):
                _log.error("workers_of_another_store", node_uid=uid, worker_uids=sorted(workers))
        self._strangers = kept
