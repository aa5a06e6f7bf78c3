"""What every controller reads from the store, so that it can answer without leading."""

from collections.abc import Callable, Sequence

from kvist.changes import Changes
from kvist.controller.v1.controller_pb2 import ClusterState
from kvist.store import Event, EventType, StateStore
from kvist.store.mirror import Mirror
from kvist.telemetry import logger
from kvist_controller.published import PublishedState
from kvist_controller.records import Keys, LeaderRecord, ServiceRecord
from kvist_controller.resources import MODEL_SERVICE_KIND

_log = logger(__name__)


class Follower:
    """Resources, cluster state and leader as the store has them; the last known ones while it is away."""

    def __init__(
        self,
        store: StateStore,
        keys: Keys,
        published: PublishedState,
        *,
        on_difference: Callable[[int], None] = lambda _keys: None,
    ) -> None:
        self.services: dict[str, ServiceRecord] = {}
        self.resource_changes = Changes()
        # Who leads; none when nobody does as far as the store says.
        self.leader: LeaderRecord | None = None
        self.leader_changes = Changes()
        self._store = store
        self._keys = keys
        self._published = published
        self._services_prefix = keys.resources(MODEL_SERVICE_KIND)
        self._mirror = Mirror(store, keys.root, on_change=self._take, on_difference=on_difference)

    @property
    def has_read(self) -> bool:
        """Whether the store was read since the start."""
        return self._mirror.revision > 0

    @property
    def is_current(self) -> bool:
        """Whether the store answers at this moment."""
        return self._mirror.is_current

    async def run(self) -> None:
        """Follows for ever."""
        await self._mirror.run()

    def _take(self, events: Sequence[Event]) -> None:
        is_news_of_resources = False
        for event in events:
            is_gone = event.type is EventType.DELETE
            if event.key.startswith(self._services_prefix):
                is_news_of_resources = True
                self._take_service(event, is_gone=is_gone)
            elif event.key == self._keys.cluster_state and not is_gone:
                self._published.offer(
                    ClusterState.FromString(event.value), store_epoch=self._store.epoch, revision=event.revision
                )
            elif event.key == self._keys.election:
                self.leader = None if is_gone else LeaderRecord.decode(event.value)
                _log.info("leader_seen", leader="" if self.leader is None else self.leader.name)
        if is_news_of_resources:
            self.resource_changes.announce()
        # Also when nothing is new: that the store answers is news to whoever waits for a leader.
        self.leader_changes.announce()

    def _take_service(self, event: Event, *, is_gone: bool) -> None:
        if is_gone:
            self.services.pop(event.key.removeprefix(self._services_prefix), None)
        else:
            service = ServiceRecord.decode(event.value, resource_version=event.revision)
            self.services[service.name] = service
