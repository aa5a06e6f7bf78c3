"""What a process that takes part in an election says of it."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvist import names


class ElectionMetrics:
    """Whether the process leads, how often leaders followed each other, and whether the store answers."""

    def __init__(
        self, registry: CollectorRegistry, *, is_leading: Callable[[], bool], is_store_up: Callable[[], bool]
    ) -> None:
        Gauge(names.LEADER, "Whether this process leads.", registry=registry).set_function(lambda: float(is_leading()))
        Gauge(names.STORE_UP, "Whether the state store answers.", registry=registry).set_function(
            lambda: float(is_store_up())
        )
        self._changes = Counter(names.LEADER_CHANGES.removesuffix("_total"), "Leaders seen.", registry=registry)
        self._seen = ""

    def note_leader(self, claim: str) -> None:
        """Somebody holds the claim; empty for nobody. The same holder again is no change."""
        if claim and claim != self._seen:
            self._seen = claim
            self._changes.inc()
