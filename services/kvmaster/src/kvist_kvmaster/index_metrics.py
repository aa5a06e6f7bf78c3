"""The index's numbers for `/metrics`, read when somebody asks for them. A router's have the same names."""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvist import names
from kvist.events.v1.events_pb2 import SourceState
from kvist.kvmaster.v1.kvmaster_pb2 import StatsResponse

_COUNTERS: Final = (
    (names.INDEX_MESSAGES, "Messages of the bus.", "messages"),
    (names.INDEX_BATCHES, "Batches applied.", "applied_batches"),
    (names.INDEX_GAPS, "Gaps seen in sequences.", "gaps"),
    (names.INDEX_CATCH_UPS, "Questions to workers about what is missing.", "catch_ups"),
    (names.INDEX_FAILED_CATCH_UPS, "Questions to workers that had no answer.", "failed_catch_ups"),
    (names.INDEX_SNAPSHOTS, "Snapshots applied.", "snapshots"),
    (names.INDEX_DIGEST_MATCHES, "Digests that matched.", "equal_digests"),
    (names.INDEX_DIGEST_MISMATCHES, "Digests that did not match.", "mismatches"),
    (names.INDEX_CLOSED_INCARNATIONS, "Incarnations that were closed.", "tombstones"),
)
_COUNTERS_BY_REASON: Final = (
    (
        names.INDEX_SKIPPED_BATCHES,
        "Batches that were not applied.",
        {"duplicate": "duplicate_batches", "old_incarnation": "refused_batches", "no_room": "dropped_batches"},
    ),
    (
        names.INDEX_REFUSED_STATEMENTS,
        "Statements that could not be used.",
        {
            "garbage": "garbage",
            "oversized": "oversized",
            "wrong_subject": "wrong_subject",
            "unknown_worker": "unknown_workers",
            "malformed": "malformed",
            "broken_history": "broken_histories",
            "overrun": "overrun_messages",
        },
    ),
)


class IndexNumbers(Protocol):
    """What is asked of the index; `_core.IndexService` is one."""

    def stats(self) -> bytes:
        """An encoded `StatsResponse`."""
        ...

    def feed_stats(self) -> str:
        """Numbers of the feed as JSON text."""
        ...


class IndexCollector(Collector):
    """Numbers of a running index."""

    def __init__(self, index: IndexNumbers) -> None:
        self._index = index

    def collect(self) -> Iterable[Metric]:
        """The present numbers."""
        feed: dict[str, Any] = json.loads(self._index.feed_stats())
        index = StatsResponse.FromString(self._index.stats())
        yield GaugeMetricFamily(names.BUS_CONNECTED, "Whether NATS is connected.", value=float(feed["bus_connected"]))
        yield _sources(index)
        for name, text, value in (
            (names.INDEX_BLOCKS, "Distinct blocks.", index.index_blocks),
            (
                names.INDEX_DIVERGENCE_BLOCKS,
                "Blocks by which sources differ from their ledgers or from their own account, at least, until mended.",
                sum(source.divergent_blocks for source in index.sources),
            ),
            (names.INDEX_BYTES, "Bytes of the index.", index.index_bytes),
            (names.INDEX_BYTE_BUDGET, "Most bytes.", index.index_byte_budget),
            (names.INDEX_SILENT_SOURCES, "Sources that have fallen silent.", feed["silent_sources"]),
            (
                names.INDEX_EVENT_LAG_BATCHES,
                "Batches by which all sources together are known to be ahead of the index.",
                feed["lag_batches"],
            ),
            (
                names.INDEX_EVENT_LAG_SECONDS,
                "From the record of the last batch in its ledger to its place in the index.",
                feed["last_lag_micros"] / 1e6,
            ),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        for name, text, key in _COUNTERS:
            yield CounterMetricFamily(name, text, value=feed[key])
        for name, text, keys in _COUNTERS_BY_REASON:
            counter = CounterMetricFamily(name, text, labels=[names.LABEL_REASON])
            for reason, key in keys.items():
                counter.add_metric([reason], feed[key])
            yield counter


def _sources(index: StatsResponse) -> GaugeMetricFamily:
    counts = Counter(source.state for source in index.sources)
    family = GaugeMetricFamily(names.INDEX_SOURCES, "Sources by state.", labels=[names.LABEL_STATE])
    for name, state in SourceState.items():
        word = name.removeprefix("SOURCE_STATE_").lower()
        if word != "unspecified":
            family.add_metric([word], counts[state])
    return family
