"""Metric families of many rows with labels, by a table."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def labelled_families(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    table: Iterable[tuple[str, str, str]],
    label_names: Sequence[str],
    rows: Sequence[tuple[Sequence[str], Mapping[str, Any]]],
) -> Iterator[Metric]:
    """One family for each line of the table.

    Args:
        kind: Gauges or counters.
        table: Name, words for people, and the key of the number in a row.
        label_names: Names of the labels.
        rows: Values of the labels, and the numbers that go with them.
    """
    for name, text, key in table:
        family = kind(name, text, labels=label_names)
        for labels, numbers in rows:
            family.add_metric(labels, float(numbers[key]))
        yield family
