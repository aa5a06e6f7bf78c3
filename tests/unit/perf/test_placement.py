"""The router has cores of its own."""

import pytest

from perf.placement import Placement, placement


@pytest.mark.parametrize(
    ("cores", "router", "others"),
    [({0, 1}, {0}, {1}), ({4, 2, 7}, {2}, {4, 7}), ({0, 1, 2, 3}, {0, 1}, {2, 3}), ({5}, {5}, {5})],
)
def test_each_side_has_half_of_the_cores(cores: set[int], router: set[int], others: set[int]) -> None:
    assert Placement(router=router, others=others) == placement(cores)


def test_cores_can_be_shared() -> None:
    assert Placement(router={0, 1}, others={0, 1}) == placement({0, 1}, is_shared=True)
