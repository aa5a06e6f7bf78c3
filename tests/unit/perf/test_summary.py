"""Percentiles and spreads."""

import pytest

from perf.summary import Spread, percentile, spread, spreads


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (50, 5), (51, 6), (90, 9), (99, 10), (100, 10)])
def test_a_percentile_is_a_sample(percent: float, expected: float) -> None:
    assert expected == percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], percent)


def test_a_single_sample_is_every_percentile() -> None:
    assert [7.0] * 3 == [percentile([7.0], percent) for percent in (0, 50, 99)]


def test_no_samples_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_a_spread_is_median_and_range() -> None:
    assert Spread(median=3.0, least=1.0, most=9.0) == spread([9.0, 1.0, 3.0])


def test_each_figure_has_its_spread() -> None:
    repetitions = [{"a": 1.04, "b": 10}, {"a": 3.06, "b": 30}]
    expected = {"a": {"median": 2.0, "least": 1.0, "most": 3.1}, "b": {"median": 20, "least": 10, "most": 30}}
    assert expected == spreads(repetitions, digits=1)
