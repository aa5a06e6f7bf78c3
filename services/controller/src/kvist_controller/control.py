"""The controller proper: resources and the fleet in memory, each change written under the leader's fence.

One task reconciles. Whatever happens (a resource, a heartbeat, a lease that ends) changes the memory at once and wakes
it; it decides, writes all changed records in one transaction, and only then tells agents and routers. Ten changes that
come together are one transaction and one cluster state.
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvist.agent.v1.agent_pb2 import AttachedEngine, NodeLoad, WorkerSpec, WorkerStatus
from kvist.changes import Changes
from kvist.controller.v1.controller_pb2 import AgentHello, ClusterState, NodeEntry, WorkerVerdict
from kvist.errors import ConflictError, KvistError, NotFoundError, UnavailableError, error, invalid_field
from kvist.store import Delete, Put, StateStore, StoreError, StoreFullError, StoreRestoredError
from kvist.store.batches import split_batches
from kvist.store.election import Leadership
from kvist.telemetry import logger
from kvist_controller.cluster_state import build_cluster_state, is_usable, pool_uid, stored_spec
from kvist_controller.fleet import DEATH_RETENTION_SECONDS, Death, Fleet, status_with_verdict
from kvist_controller.orders import NodeOrders, Orders
from kvist_controller.placement import SlotView, plan
from kvist_controller.plain import to_struct
from kvist_controller.pools import PoolSpec
from kvist_controller.presence import Presence, PresenceTimes
from kvist_controller.published import PublishedState
from kvist_controller.records import Keys, NodeRecord, ServiceRecord, SlotRecord, decode_contract
from kvist_controller.resources import INVALID_MANIFEST, MODEL_SERVICE_KIND, ModelServiceSpec
from kvist_controller.revision import pool_revision
from kvist_controller.silence import Silence, Suspect
from kvist_controller.status import Observation, PoolObservation, build_status
from kvist_controller.verdict import PoolContract

TICK_SECONDS = 0.5
RETRY_SECONDS = 0.5
# A node that is lost, empty and silent for this long is forgotten.
FORGET_NODE_SECONDS = 3_600.0
_SLOT_TOKEN_BYTES = 3

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Clocks:
    """Both clocks, so that tests can turn them.

    Attributes:
        monotonic: For leases.
        unix: For people.
    """

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time


class Controller:
    """Leads one cluster for as long as its leadership lasts."""

    def __init__(
        self,
        store: StateStore,
        leadership: Leadership,
        *,
        cluster: str,
        times: PresenceTimes,
        published: PublishedState | None = None,
        clocks: Clocks | None = None,
        silence: Silence | None = None,
    ) -> None:
        self.cluster = cluster
        self.hash_seed = 0
        self.services: dict[str, ServiceRecord] = {}
        # Announced when resources, respectively orders and verdicts have changed.
        self.resource_changes = Changes()
        self.order_changes = Changes()
        self._store = store
        self._leadership = leadership
        self._keys = Keys(cluster)
        self._clocks = clocks or Clocks()
        self._silence = silence or Silence()
        self._presence = Presence(times)
        self._fleet = Fleet(keys=self._keys, hash_seed=0, presence=self._presence)
        self._orders = Orders()
        self._published = published or PublishedState()
        self._state_bytes = b""
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()

    # Life.

    async def load(self) -> None:
        """Reads what the leader before has left. Nothing is published before the first reconciliation."""
        now_seconds = self._clocks.monotonic()
        self.hash_seed = await self._load_hash_seed()
        fleet = self._fleet = Fleet(keys=self._keys, hash_seed=self.hash_seed, presence=self._presence)
        prefix = self._keys.resources(MODEL_SERVICE_KIND)
        for item in (await self._store.list(prefix)).items:
            service = ServiceRecord.decode(item.value, resource_version=item.mod_revision)
            self.services[service.name] = service
        for item in (await self._store.list(self._keys.nodes)).items:
            node = NodeRecord.decode(item.value)
            fleet.nodes[node.uid] = node
        for item in (await self._store.list(self._keys.workers)).items:
            slot = SlotRecord.decode(item.value)
            fleet.slots[slot.uid] = slot
        for item in (await self._store.list(self._keys.contracts)).items:
            pool, revision = item.key.removeprefix(self._keys.contracts).split("/")
            fleet.contracts[pool, revision] = decode_contract(item.value)
        published = await self._store.get(self._keys.cluster_state)
        if published is not None:
            self._state_bytes = published.value
            state = ClusterState.FromString(published.value)
            self._publish(state, revision=published.mod_revision)
            fleet.deaths = {dead.worker_uid: Death(dead.incarnation, now_seconds) for dead in state.dead_incarnations}
            for entry in state.attached:
                fleet.attached.setdefault(entry.node_uid, []).append(entry.engine)
        self._presence.load(fleet.nodes, now_seconds=now_seconds)
        _log.info("state_loaded", services=len(self.services), nodes=len(fleet.nodes), slots=len(fleet.slots))

    async def _load_hash_seed(self) -> int:
        stored = await self._store.get(self._keys.hash_seed)
        if stored is not None:
            return int(stored.value)
        seed = secrets.randbits(64)
        await self._leadership.commit(self._store, [Put(self._keys.hash_seed, str(seed).encode())])
        return seed

    async def run(self) -> None:
        """Reconciles on each change and each tick, until cancelled.

        Raises:
            KvistError: STALE_FENCE, when somebody else leads.
            StoreRestoredError: The store has gone back to an older state.
        """
        while True:
            self._wake.clear()
            try:
                await self.reconcile()
            except StoreRestoredError:
                # What is in memory is of another history: the next term reads it again.
                raise
            except StoreError as failure:
                # Membership is frozen until the store answers; what routers know stays as it is.
                _log.warning("reconcile_deferred", reason=str(failure))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            try:
                async with asyncio.timeout(TICK_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def watch_silent_nodes(self) -> None:
        """Asks the workers of nodes whose leases have ended, until cancelled."""
        await self._silence.watch(self._suspects, self._wake.set)

    def _suspects(self) -> list[Suspect]:
        now_seconds = self._clocks.monotonic()
        return [
            Suspect(slot.uid, slot.status.address, slot.status.description.incarnation)
            for slot in self._fleet.slots.values()
            if slot.status is not None
            and slot.status.address
            and not self._presence.is_present(slot.node_uid, now_seconds=now_seconds)
        ]

    # Resources.

    def service(self, name: str) -> ServiceRecord:
        """One resource.

        Raises:
            NotFoundError: There is none.
        """
        try:
            return self.services[name]
        except KeyError:
            raise NotFoundError(f"there is no {MODEL_SERVICE_KIND} {name!r}") from None

    async def apply(
        self,
        name: str,
        spec: ModelServiceSpec,
        *,
        labels: Mapping[str, str],
        annotations: Mapping[str, str],
        resource_version: str,
        validate_only: bool,
    ) -> tuple[ServiceRecord, bool | None]:
        """Creates or changes a resource.

        Returns:
            The resource, and whether it was created (true), changed (false) or equal (none).

        Raises:
            KvistError: A served name is taken, or the resource is another one than the caller has seen.
        """
        present = self.services.get(name)
        self._check_names(name, spec)
        if resource_version and (present is None or resource_version != str(present.resource_version)):
            raise ConflictError(f"{MODEL_SERVICE_KIND} {name!r} was changed meanwhile: read it again")
        plain = spec.to_plain()
        if present is None:
            service = ServiceRecord(
                name=name,
                uid=str(uuid.uuid4()),
                generation=1,
                created_at_unix_nanos=int(self._clocks.unix() * 1e9),
                spec=plain,
                labels=dict(labels),
                annotations=dict(annotations),
            )
        elif present.deleted_at_unix_nanos is not None:
            raise ConflictError(f"{MODEL_SERVICE_KIND} {name!r} is being deleted: apply it when it is gone")
        else:
            service = replace(
                present,
                generation=present.generation + int(plain != present.spec),
                spec=plain,
                labels=dict(labels),
                annotations=dict(annotations),
            )
        is_new = present is None or present.resource_version == 0
        result = None if service == present and not is_new else is_new
        if validate_only or (service == present and not self._is_pending(service)):
            return service, result
        await self._put_service(service)
        return self.services.get(name, service), result

    def _check_names(self, name: str, spec: ModelServiceSpec) -> None:
        for other in self.services.values():
            if other.name == name:
                continue
            taken = sorted(set(stored_spec(other).served_names) & set(spec.served_names))
            if taken:
                field = "spec.model" if taken[0] == spec.model else "spec.aliases"
                raise invalid_field(
                    field, f"{taken[0]!r} is served by {MODEL_SERVICE_KIND} {other.name!r}", code=INVALID_MANIFEST
                )

    async def delete(self, name: str) -> ServiceRecord:
        """Marks a resource for deletion; it is gone when its workers have drained.

        Raises:
            NotFoundError: There is none.
        """
        service = self.service(name)
        if service.deleted_at_unix_nanos is None:
            service = replace(service, deleted_at_unix_nanos=int(self._clocks.unix() * 1e9))
            await self._put_service(service)
        elif self._is_pending(service):
            await self._put_service(service)
        return self.services.get(name, service)

    async def _put_service(self, service: ServiceRecord) -> None:
        self._remember_service(service)
        try:
            await self._write()
        except StoreFullError as failure:
            raise UnavailableError(
                "the state store is full and takes no writes: see docs/guides/production.md"
            ) from failure
        except StoreError as failure:
            raise UnavailableError("the state store does not answer; the change may still be made") from failure
        self._wake.set()

    def _is_pending(self, service: ServiceRecord) -> bool:
        """Whether the store may lack what is known of a service: an earlier write of it had no good end."""
        return self._keys.resource(MODEL_SERVICE_KIND, service.name) in self._fleet.pending

    def _remember_service(self, service: ServiceRecord) -> None:
        self.services[service.name] = service
        self._fleet.pending[self._keys.resource(MODEL_SERVICE_KIND, service.name)] = service.encode()

    # Agents.

    def hello(self, hello: AgentHello) -> None:
        """An agent has introduced its node."""
        self._fleet.attach(hello.inventory.node_uid, hello.attached)
        self._fleet.hello(hello, now_seconds=self._clocks.monotonic(), now_unix_seconds=self._clocks.unix())
        self._wake.set()

    def heartbeat(
        self,
        node_uid: str,
        workers: Sequence[WorkerStatus],
        *,
        load: NodeLoad | None,
        attached: Sequence[AttachedEngine] = (),
    ) -> None:
        """An agent is alive."""
        is_news = self._fleet.attach(node_uid, attached)
        self._fleet.heartbeat(
            node_uid,
            workers,
            load=load,
            now_seconds=self._clocks.monotonic(),
            now_unix_seconds=self._clocks.unix(),
        )
        if self._fleet.pending or is_news:
            self._wake.set()

    def orders(self, node_uid: str) -> NodeOrders:
        """What a node shall run."""
        return self._orders.of(node_uid)

    @property
    def strange_workers(self) -> int:
        """Workers of another store that are left alone, since this one has no resource."""
        return self._orders.strange_workers

    def verdicts(self, node_uid: str) -> list[WorkerVerdict]:
        """What the controller thinks of a node's workers."""
        return self._fleet.verdicts(node_uid)

    @property
    def may_command(self) -> bool:
        """Whether nobody else can lead yet."""
        return self._leadership.is_certain

    @property
    def fence(self) -> int:
        """The number that makes an expired leader's commands fail."""
        return self._leadership.fence

    def node_entries(self) -> list[NodeEntry]:
        """All nodes, for people."""
        return self._fleet.node_entries(now_seconds=self._clocks.monotonic())

    # Cluster state.

    @property
    def cluster_state(self) -> ClusterState:
        """The last published cluster state; its revision is 0 before the first."""
        return self._published.state

    # Reconciliation.

    async def reconcile(self) -> None:
        """Decides, writes, tells."""
        now_seconds = self._clocks.monotonic()
        silent = self._silence.workers(self._suspects())
        for service in list(self.services.values()):
            self._reconcile_service(service, silent=silent, now_seconds=now_seconds)
        self._prune(now_seconds=now_seconds)
        state = build_cluster_state(
            cluster=self.cluster,
            hash_seed=self.hash_seed,
            services=self.services.values(),
            slots=self._fleet.slots.values(),
            nodes=self._fleet.nodes,
            attached=self._fleet.attached_engines(now_seconds=now_seconds),
            contracts=self._fleet.contracts,
            dead_incarnations={
                uid: death.incarnation
                for uid, death in self._fleet.deaths.items()
                if now_seconds - death.noted_at_seconds < DEATH_RETENTION_SECONDS
            },
            silent_workers=silent,
        )
        encoded = state.SerializeToString(deterministic=True)
        # Still pending means that a write failed, so that what the store holds is unknown.
        is_news = encoded != self._state_bytes or self._keys.cluster_state in self._fleet.pending
        if is_news:
            self._fleet.pending[self._keys.cluster_state] = encoded
        revision = await self._write()
        if is_news:
            self._state_bytes = encoded
            self._publish(state, revision=revision)
        # After the write, so that no worker runs that the store does not know.
        self._orders.renew(self._fleet, has_resources=bool(self.services))
        self.order_changes.announce()

    def _reconcile_service(self, service: ServiceRecord, *, silent: frozenset[str], now_seconds: float) -> None:
        spec = stored_spec(service)
        is_deleting = service.deleted_at_unix_nanos is not None
        fleet = self._fleet
        for slot in fleet.slots_of(service.uid):
            if slot.is_draining and self._presence.is_lost(slot.node_uid, now_seconds=now_seconds):
                # Nobody is left who could say that it has ended; its node is told to end it should it come back.
                fleet.drop_slot(slot.uid)
        observed = [
            self._reconcile_pool(service, spec, pool, is_deleting=is_deleting, silent=silent, now_seconds=now_seconds)
            for pool in spec.all_pools
        ]
        self._drain_former_pools(service, spec, is_replaced=is_deleting or all(pool.is_served for pool in observed))
        remaining = fleet.slots_of(service.uid)
        if is_deleting and not remaining:
            del self.services[service.name]
            fleet.pending[self._keys.resource(MODEL_SERVICE_KIND, service.name)] = None
            _log.info("service_deleted", service=service.name)
            return
        self._state_status(service, remaining, observed, silent=silent)

    def _reconcile_pool(
        self,
        service: ServiceRecord,
        spec: ModelServiceSpec,
        pool: PoolSpec,
        *,
        is_deleting: bool,
        silent: frozenset[str],
        now_seconds: float,
    ) -> PoolObservation:
        revision = pool_revision(spec, pool)
        uid = pool_uid(service.uid, pool.name)
        desired = 0 if is_deleting else pool.replicas
        fleet = self._fleet
        self._fix_contract(uid, spec, revision)
        own = [slot for slot in fleet.slots_of(service.uid) if slot.spec.pool_uid == uid]
        for slot in own:
            if slot.spec.pool_revision == revision:
                fleet.put_slot(replace(slot, spec=self._worker_spec(service, spec, pool, slot.uid)))
        dead = fleet.dead_incarnations()
        views = [self._slot_view(slot, silent=silent, dead=dead, now_seconds=now_seconds) for slot in own]
        steps = plan(
            desired=desired,
            revision=revision,
            engine=spec.engine.name,
            slots=views,
            nodes=fleet.node_views(now_seconds=now_seconds),
        )
        for slot_uid in steps.drain:
            fleet.put_slot(replace(fleet.slots[slot_uid], is_draining=True))
            _log.info("slot_draining", worker_uid=slot_uid, service=service.name)
        for new in steps.create:
            slot_uid = f"{service.name}-{secrets.token_hex(_SLOT_TOKEN_BYTES)}-{new.ordinal}"
            worker_spec = self._worker_spec(service, spec, pool, slot_uid)
            fleet.put_slot(SlotRecord(service.uid, new.ordinal, new.node_uid, worker_spec))
            _log.info("slot_placed", worker_uid=slot_uid, service=service.name, node_uid=new.node_uid)
        ready = [view for view in views if view.is_ready and not view.is_draining and view.uid not in steps.drain]
        return PoolObservation(
            name=pool.name,
            role=pool.role,
            desired=desired,
            ready=len(ready),
            updated_ready=sum(view.revision == revision for view in ready),
            unplaced=steps.unplaced,
        )

    def _slot_view(
        self, slot: SlotRecord, *, silent: frozenset[str], dead: Mapping[str, int], now_seconds: float
    ) -> SlotView:
        """A slot as placement sees it.

        One whose node is silent is not lost while its worker answers: after an outage of the network between
        controllers and agents all nodes are silent at once, and what serves is not replaced.
        """
        is_ready = slot.uid not in silent and is_usable(slot, dead)
        view = self._fleet.slot_view(slot, is_ready=is_ready, now_seconds=now_seconds)
        return replace(view, is_lost=view.is_lost and not is_ready)

    def _drain_former_pools(self, service: ServiceRecord, spec: ModelServiceSpec, *, is_replaced: bool) -> None:
        """Workers of pools that the resource has no more serve until those that it has can."""
        if not is_replaced:
            return
        present = {pool_uid(service.uid, pool.name) for pool in spec.all_pools}
        for slot in self._fleet.slots_of(service.uid):
            if slot.spec.pool_uid not in present and not slot.is_draining:
                self._fleet.put_slot(replace(slot, is_draining=True))
                _log.info("slot_draining", worker_uid=slot.uid, service=service.name)

    def _fix_contract(self, uid: str, spec: ModelServiceSpec, revision: str) -> None:
        """A resource may pin what else the first accepted worker fixes."""
        key = (uid, revision)
        pinned = PoolContract(tokenizer_digest=spec.tokenizer_digest, hash_unit_tokens=spec.hash_unit_tokens)
        if key not in self._fleet.contracts and pinned != PoolContract():
            self._fleet.put_contract(*key, pinned)

    def _state_status(
        self,
        service: ServiceRecord,
        slots: Sequence[SlotRecord],
        pools: Sequence[PoolObservation],
        *,
        silent: frozenset[str],
    ) -> None:
        dead = self._fleet.dead_incarnations()
        active = [slot for slot in slots if not slot.is_draining]
        ready = [slot for slot in active if slot.uid not in silent and is_usable(slot, dead)]
        observed = Observation(
            generation=service.generation,
            desired=sum(pool.desired for pool in pools),
            active=len(active),
            ready=len(ready),
            updated_ready=sum(pool.updated_ready for pool in pools),
            draining=len(slots) - len(active),
            unplaced=sum(pool.unplaced for pool in pools),
            pools=tuple(pools),
            problems=tuple(
                f"{slot.uid}: {message}"
                for slot in sorted(active, key=lambda slot: slot.ordinal)
                if slot not in ready and (message := _problem(slot, silent))
            ),
            is_deleting=service.deleted_at_unix_nanos is not None,
        )
        status = build_status(observed, previous=service.status, now_unix_seconds=self._clocks.unix())
        if status != service.status:
            self._remember_service(replace(service, status=status))

    def _worker_spec(
        self, service: ServiceRecord, spec: ModelServiceSpec, pool: PoolSpec, worker_uid: str
    ) -> WorkerSpec:
        worker = WorkerSpec(
            worker_uid=worker_uid,
            model=spec.model,
            engine=spec.engine.name,
            engine_arguments=to_struct(spec.arguments_of(pool)),
            pool_uid=pool_uid(service.uid, pool.name),
            pool_revision=pool_revision(spec, pool),
            role=pool.wire_role,
            hand_over=spec.hand_over,
            hash_seed=self.hash_seed,
        )
        worker.drain_time_limit.FromNanoseconds(int(spec.drain_timeout * 1e9))
        worker.startup_time_limit.FromNanoseconds(int(spec.startup_timeout * 1e9))
        return worker

    def _prune(self, *, now_seconds: float) -> None:
        fleet = self._fleet
        present = {
            (pool_uid(service.uid, pool.name), pool_revision(spec, pool))
            for service in self.services.values()
            for spec in (stored_spec(service),)
            for pool in spec.all_pools
        }
        used = present | {(slot.spec.pool_uid, slot.spec.pool_revision) for slot in fleet.slots.values()}
        for pool, revision in [key for key in fleet.contracts if key not in used]:
            fleet.drop_contract(pool, revision)
        occupied = {slot.node_uid for slot in fleet.slots.values()}
        for uid in [uid for uid in fleet.nodes if uid not in occupied]:
            if self._presence.is_lost(uid, now_seconds=now_seconds - FORGET_NODE_SECONDS):
                fleet.drop_node(uid)
        fleet.prune_deaths(now_seconds=now_seconds)

    async def _write(self) -> int:
        """Writes all pending records, the cluster state last, and returns the store's revision.

        Raises:
            StoreError: It is unknown what was written; all of it is written again.
            KvistError: STALE_FENCE, when somebody else leads.
        """
        async with self._writing:
            revision = 0
            for batch in split_batches(self._fleet.pending, last_key=self._keys.cluster_state):
                operations = [Delete(key) if value is None else Put(key, value) for key, value in batch.items()]
                revision = (await self._leadership.commit(self._store, operations)).revision
                for key, value in batch.items():
                    # A record that changed again meanwhile stays pending.
                    if self._fleet.pending.get(key, value) is value:
                        self._fleet.pending.pop(key, None)
                self._note_versions(batch, revision)
            return revision

    def _note_versions(self, batch: Mapping[str, Any], revision: int) -> None:
        prefix = self._keys.resources(MODEL_SERVICE_KIND)
        written = [key.removeprefix(prefix) for key in batch if key.startswith(prefix)]
        for name in written:
            service = self.services.get(name)
            if service is not None:
                self.services[name] = replace(service, resource_version=revision)
        if written:
            self.resource_changes.announce()

    def _publish(self, state: ClusterState, *, revision: int) -> None:
        self._published.offer(state, store_epoch=self._store.epoch, revision=revision)


def _problem(slot: SlotRecord, silent: frozenset[str]) -> str:
    if slot.uid in silent:
        return "its node is silent, and it does not answer"
    return "" if slot.status is None else status_with_verdict(slot).message


def not_leading() -> KvistError:
    """The error of a controller that does not lead."""
    return error("NOT_READY", "this controller does not lead yet", retry_after_seconds=1.0)
