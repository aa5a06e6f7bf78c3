"""The cluster state that this process gives to routers and KV masters, whoever made it.

A leader puts here what it has just written, and every process what it reads from the store. The newest stays: so each
controller serves `WatchCluster`, with or without a leader, and while the store is away.
"""

from kvist.changes import Changes
from kvist.controller.v1.controller_pb2 import ClusterState


class PublishedState:
    """The newest cluster state seen."""

    def __init__(self) -> None:
        # Its version is absent before the first.
        self.state = ClusterState()
        self.changes = Changes()

    def offer(self, state: ClusterState, *, store_epoch: int, revision: int) -> None:
        """Takes a state unless it is older than the present one.

        Args:
            state: The state; its own version is not looked at.
            store_epoch: Epoch of the store.
            revision: Revision that wrote the state.
        """
        present = self.state.version
        if (store_epoch, revision) <= (present.store_epoch, present.revision):
            return
        published = ClusterState()
        published.CopyFrom(state)
        published.version.store_epoch = store_epoch
        published.version.revision = revision
        self.state = published
        self.changes.announce()
