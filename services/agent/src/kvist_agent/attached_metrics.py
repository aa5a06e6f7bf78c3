"""Numbers of attached engines for `/metrics`, read when somebody asks for them."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvist import names
from kvist_agent.labelled_metrics import labelled_families

_OF_RANK: Final = [names.LABEL_WORKER, names.LABEL_RANK]
_GAUGES: Final = (
    (names.ATTACHED_CONNECTED, "Whether the events socket is connected.", "connected"),
    (names.ATTACHED_IN_TOUCH, "Whether the engine confirms what was said so far.", "in_touch"),
    (names.ATTACHED_COMPLETE, "Whether the ledger misses nothing.", "complete"),
    (names.ATTACHED_BLOCKS, "Blocks held, as the ledger counts them.", "blocks"),
    (names.ATTACHED_HINTS, "Hints of media that never report removals.", "hints"),
)
_COUNTERS: Final = (
    (names.ATTACHED_DUPLICATE_BATCHES, "Batches that were taken before.", "duplicate_batches"),
    (names.ATTACHED_EVENTS, "Events that were understood.", "events"),
    (names.ATTACHED_GAPS, "Gaps in the engine's numbers.", "gaps"),
    (names.ATTACHED_LOSSES, "Times that batches were lost for ever.", "losses"),
    (names.ATTACHED_RESTARTS, "Other starts of the engine.", "restarts"),
    (names.ATTACHED_QUESTIONS, "Questions to the replay socket.", "questions"),
    (names.ATTACHED_FAILED_QUESTIONS, "Questions without a whole answer.", "failed_questions"),
)
_COUNTERS_BY_REASON: Final = (
    (names.ATTACHED_BATCHES, "Batches taken, by the socket they came from.", "batches", names.LABEL_SOCKET),
    (names.ATTACHED_HASH_CHECKS, "Hashes of blocks that were recomputed.", "hash_checks", names.LABEL_OUTCOME),
    (names.ATTACHED_REFUSED, "Messages, batches and events refused.", "refused", names.LABEL_REASON),
    (names.ATTACHED_LEFT_OUT_BLOCKS, "Blocks left out of the ledger.", "left_out_blocks", names.LABEL_REASON),
)


class AttachedNumbers(Protocol):
    """What is asked of the core; `_core.AttachedEngines` is one."""

    def stats(self) -> str:
        """Numbers of all engines as JSON text."""
        ...


class AttachedCollector(Collector):
    """Numbers of the attached engines, by UID and rank."""

    def __init__(self, engines: AttachedNumbers) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        """The present numbers."""
        ranks = list(_ranks(json.loads(self._engines.stats())))
        yield from labelled_families(GaugeMetricFamily, _GAUGES, _OF_RANK, ranks)
        yield from labelled_families(CounterMetricFamily, _COUNTERS, _OF_RANK, ranks)
        for name, text, key, label in _COUNTERS_BY_REASON:
            counter = CounterMetricFamily(name, text, labels=[*_OF_RANK, label])
            for labels, numbers in ranks:
                for reason, count in numbers[key].items():
                    counter.add_metric([*labels, reason], count)
            yield counter


def _ranks(engines: list[dict[str, Any]]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    for engine in engines:
        for rank, numbers in enumerate(engine["ranks"]):
            yield [engine["worker_uid"], str(rank)], numbers
