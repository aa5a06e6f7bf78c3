"""Which nodes are present. Pure: the clock is an argument.

Leases live with the leader and not in the store: while no controller runs nothing expires, and a new leader gives every
node it finds in the store three lease times before it counts the node as absent.
"""

from collections.abc import Iterable
from dataclasses import dataclass

GRACE_LEASES_AFTER_START = 3


@dataclass(frozen=True, slots=True)
class PresenceTimes:
    """How long silence is borne.

    Attributes:
        lease_seconds: A node is present for this long after a heartbeat.
        replace_after_seconds: For how long after that its replicas are not started elsewhere.
    """

    lease_seconds: float
    replace_after_seconds: float


class Presence:
    """The leases of all nodes."""

    def __init__(self, times: PresenceTimes) -> None:
        self._times = times
        self._present_until: dict[str, float] = {}

    def load(self, node_uids: Iterable[str], *, now_seconds: float) -> None:
        """Takes over the nodes of the leader before."""
        grace_seconds = GRACE_LEASES_AFTER_START * self._times.lease_seconds
        self._present_until |= dict.fromkeys(node_uids, now_seconds + grace_seconds)

    def heard(self, node_uid: str, *, now_seconds: float) -> None:
        """Renews a lease."""
        self._present_until[node_uid] = now_seconds + self._times.lease_seconds

    def forget(self, node_uid: str) -> None:
        """Drops a node."""
        self._present_until.pop(node_uid, None)

    def is_present(self, node_uid: str, *, now_seconds: float) -> bool:
        """Whether the node's lease lives."""
        return now_seconds < self._present_until.get(node_uid, float("-inf"))

    def is_lost(self, node_uid: str, *, now_seconds: float) -> bool:
        """Whether the node has been silent for so long that its replicas shall run elsewhere."""
        until = self._present_until.get(node_uid, float("-inf"))
        return now_seconds >= until + self._times.replace_after_seconds
