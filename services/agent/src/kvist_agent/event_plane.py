"""What the node says on the bus: KV events by the Rust relay, tombstones by `kvist.bus`.

The bus's subjects carry the cluster's name, which the agent learns from a controller at its first session and then
keeps; until it is known, tombstones wait.
"""

import asyncio
import contextlib
import json
from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from kvist import _core
from kvist.agent.v1.agent_pb2 import WORKER_PHASE_DRAINING, WORKER_PHASE_READY
from kvist.bus import Bus, check_files
from kvist.errors import core_errors
from kvist.events.v1.events_pb2 import Tombstone
from kvist.settings import BusSettings
from kvist.telemetry import logger
from kvist_agent.attached import AttachedEngines
from kvist_agent.relay_metrics import RelayCollector
from kvist_agent.slots import WorkerSlots

RELAY_THREADS = 1

_log = logger(__name__)


class EventPlane:
    """The node's share of the event plane."""

    def __init__(
        self,
        settings: BusSettings,
        *,
        node_uid: str,
        registry: CollectorRegistry,
        worker_tls: Mapping[str, object] | None = None,
    ) -> None:
        # The bus is used once the cluster is known; a wrong file is to be known before.
        check_files(settings)
        self._settings = settings
        self._worker_tls = worker_tls
        self._client_name = f"agent-{node_uid}"
        self._registry = registry
        self._cluster = ""
        self._cluster_known = asyncio.Event()
        self._bus: Bus | None = None
        self._waiting: dict[str, Tombstone] = {}

    def enter_cluster(self, cluster: str) -> None:
        """States the cluster's name. Another one than before needs a restart of the agent."""
        if not cluster or cluster == self._cluster:
            return
        if self._cluster:
            _log.error("cluster_changed", cluster=cluster, before=self._cluster, hint="restart the agent")
            return
        self._cluster = cluster
        self._cluster_known.set()

    async def publish_tombstone(self, tombstone: Tombstone) -> None:
        """Announces a death as soon as that is possible."""
        if self._bus is None:
            self._waiting[tombstone.worker_uid] = tombstone
        else:
            await self._bus.publish_tombstone(tombstone)

    async def run(self, slots: WorkerSlots, attached: AttachedEngines) -> None:
        """Relays events until cancelled. Without NATS servers, it only waits."""
        await self._cluster_known.wait()
        if not self._settings.urls:
            _log.warning("bus_switched_off", hint="without bus.urls no KV events leave this node")
            return
        async with Bus(
            self._settings, cluster=self._cluster, client_name=self._client_name, registry=self._registry
        ) as bus:
            self._bus = bus
            try:
                for tombstone in list(self._waiting.values()):
                    await bus.publish_tombstone(tombstone)
                self._waiting.clear()
                await self._relay(slots, attached)
            finally:
                self._bus = None

    async def _relay(self, slots: WorkerSlots, attached: AttachedEngines) -> None:
        settings = relay_settings(
            self._settings,
            cluster=self._cluster,
            client_name=f"{self._client_name}-relay",
            worker_tls=self._worker_tls,
        )
        runtime = _core.Runtime(RELAY_THREADS)
        try:
            with core_errors():
                relay = _core.Relay(runtime, json.dumps(settings))
                await asyncio.to_thread(relay.start)
            numbers = RelayCollector(relay)
            self._registry.register(numbers)
            try:
                engines = await attached.core()
                if engines is not None:
                    with core_errors():
                        await asyncio.to_thread(relay.attach, engines)
                await _feed(relay, slots)
            finally:
                self._registry.unregister(numbers)
                with contextlib.suppress(_core.CoreError):
                    relay.stop()
        finally:
            runtime.close()


def relay_settings(
    bus: BusSettings, *, cluster: str, client_name: str, worker_tls: Mapping[str, object] | None = None
) -> dict[str, object]:
    """What the relay is told."""
    settings: dict[str, object] = {"nats_url": ",".join(bus.urls), "cluster": cluster, "client_name": client_name}
    if bus.credentials_file is not None:
        settings["credentials_file"] = str(bus.credentials_file)
    if bus.tls_ca_file is not None:
        settings["tls_ca_file"] = str(bus.tls_ca_file)
    if worker_tls is not None:
        settings["tls"] = worker_tls
    return settings


def relayed_workers(slots: WorkerSlots) -> str:
    """The relay's input: every worker that answers, refused ones included, since their ledgers are true as well."""
    workers = [
        {"uid": status.spec.worker_uid, "address": slots.slot(status.spec.worker_uid).local_address}
        for status in slots.statuses()
        if status.phase in {WORKER_PHASE_READY, WORKER_PHASE_DRAINING} and status.address
    ]
    return json.dumps(workers)


async def _feed(relay: _core.Relay, slots: WorkerSlots) -> None:
    """Keeps the relay's workers those of the node, for ever."""
    sent = ""
    while True:
        number = slots.changes.number
        workers = relayed_workers(slots)
        if workers != sent:
            with core_errors():
                await asyncio.to_thread(relay.set_workers, workers)
            sent = workers
        await slots.changes.after(number)
