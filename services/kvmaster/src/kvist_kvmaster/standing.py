"""Which part this KV master plays: it leads, or stands by with the same index and would lead next."""

import asyncio
import time

from prometheus_client import CollectorRegistry

from kvist.election_metrics import ElectionMetrics
from kvist.kvmaster.v1.kvmaster_pb2 import INSTANCE_ROLE_LEADER, INSTANCE_ROLE_STANDBY, InstanceRole
from kvist.settings import StoreSettings
from kvist.state_store import serve_with_store
from kvist.store import StateStore
from kvist.store.election import Leadership, lead
from kvist.store.mirror import Mirror
from kvist_kvmaster.catalogue import Catalogue


class Standing:
    """The election among KV masters, and the catalogue that its winner writes.

    Lookups need neither: while the store is away, or nobody leads, every instance answers from its index.
    """

    def __init__(
        self,
        store: StoreSettings | None,
        *,
        cluster: str,
        name: str,
        lease_seconds: float,
    ) -> None:
        self._settings = store
        self._root = f"/kvist/{cluster}/v1/"
        self._name = name
        self._lease_seconds = lease_seconds
        self._leadership: Leadership | None = None
        # Absent until the store could be opened.
        self.catalogue: Catalogue | None = None
        # Name of whoever leads, as the store says.
        self.leader_name = ""
        self._election: Mirror | None = None
        self._metrics: ElectionMetrics | None = None

    @property
    def has_store(self) -> bool:
        """Whether there is a store to elect by."""
        return self._settings is not None

    def measure(self, registry: CollectorRegistry) -> None:
        """Tells `/metrics` of the election; nothing without a store."""
        if self.has_store:
            self._metrics = ElectionMetrics(
                registry,
                is_leading=lambda: self.leadership is not None,
                is_store_up=lambda: self._election is not None and self._election.is_current,
            )

    @property
    def leadership(self) -> Leadership | None:
        """The claim, while nobody else can have another."""
        leadership = self._leadership
        return leadership if leadership is not None and leadership.is_certain else None

    @property
    def role(self) -> InstanceRole.ValueType:
        """The part it plays now. Alone without a store, it leads."""
        leads = not self.has_store or self.leadership is not None
        return INSTANCE_ROLE_LEADER if leads else INSTANCE_ROLE_STANDBY

    @property
    def fence(self) -> int:
        """Of its leadership; 0 when it does not lead."""
        leadership = self.leadership
        return 0 if leadership is None else leadership.fence

    async def run(self) -> None:
        """Opens the store, then leads again and again, for ever."""
        if self._settings is None:
            return
        await serve_with_store(self._settings, self._take_part)

    async def _take_part(self, store: StateStore) -> None:
        catalogue = Catalogue(store, f"{self._root}prefixes/", unix_nanoseconds=time.time_ns)
        election = f"{self._root}elections/kvmaster"

        def note_leader(_events: object) -> None:
            found = leader.contents.get(election)
            self.leader_name = "" if found is None else found.value.decode()
            if self._metrics is not None:
                self._metrics.note_leader(self.leader_name)

        leader = self._election = Mirror(store, election, on_change=note_leader)
        self.catalogue = catalogue
        async with asyncio.TaskGroup() as group:
            group.create_task(catalogue.run())
            group.create_task(leader.run())
            while True:
                async with lead(
                    store, election, identity=self._name, ttl_seconds=self._lease_seconds
                ) as self._leadership:
                    await self._leadership.lost.wait()
                self._leadership = None
