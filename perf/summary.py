"""Figures of many samples in a few numbers."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the repetitions of a benchmark.

    Attributes:
        median: The middle one.
        least: The least.
        most: The most.
    """

    median: float
    least: float
    most: float


def percentile(samples: Sequence[float], percent: float) -> float:
    """The sample that so many percent of all samples are not above (nearest rank).

    Raises:
        ValueError: There are no samples.
    """
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def spread(figures: Sequence[float]) -> Spread:
    """Median and range."""
    return Spread(statistics.median(figures), min(figures), max(figures))


def spreads(repetitions: Sequence[Mapping[str, float]], *, digits: int = 1) -> dict[str, dict[str, float]]:
    """The spread of each figure, rounded; all repetitions have the same figures."""
    return {
        name: {key: round(value, digits) for key, value in asdict(spread([one[name] for one in repetitions])).items()}
        for name in repetitions[0]
    }
