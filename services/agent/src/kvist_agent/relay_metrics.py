"""The relay's numbers for `/metrics`, read when somebody asks for them."""

import json
from collections.abc import Iterable
from typing import Any, Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvist import names
from kvist_agent.labelled_metrics import labelled_families

_GAUGES: Final = ((names.RELAY_CONNECTED, "Whether the worker's stream stands.", "connected"),)
_COUNTERS: Final = (
    (names.RELAY_MESSAGES, "Messages published.", "messages"),
    (names.RELAY_BATCHES, "Batches published.", "batches"),
    (names.RELAY_BYTES, "Bytes published.", "bytes"),
    (names.RELAY_DROPPED_BATCHES, "Batches that were not published: the bus was away.", "dropped_batches"),
    (names.RELAY_SKIPPED_SNAPSHOTS, "Snapshots that came instead of a range.", "skipped_snapshots"),
    (names.RELAY_BROKEN_STREAMS, "Streams that broke or could not be made.", "broken_streams"),
)


class RelayNumbers(Protocol):
    """What is asked of the relay; `_core.Relay` is one."""

    def stats(self) -> str:
        """Numbers of the relay as JSON text."""
        ...


class RelayCollector(Collector):
    """Numbers of a running relay, by worker. A worker that is no longer relayed has none."""

    def __init__(self, relay: RelayNumbers) -> None:
        self._relay = relay

    def collect(self) -> Iterable[Metric]:
        """The present numbers."""
        stats: dict[str, Any] = json.loads(self._relay.stats())
        workers: dict[str, dict[str, Any]] = stats["workers"]
        yield GaugeMetricFamily(
            names.RELAY_BUS_CONNECTED, "Whether the relay's NATS is connected.", value=float(stats["bus_connected"])
        )
        rows = [([uid], numbers) for uid, numbers in workers.items()]
        yield from labelled_families(GaugeMetricFamily, _GAUGES, [names.LABEL_WORKER], rows)
        yield from labelled_families(CounterMetricFamily, _COUNTERS, [names.LABEL_WORKER], rows)
