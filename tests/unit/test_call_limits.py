"""How many calls a server takes."""

import contextlib

import pytest

from kvist.errors import KvistError
from kvist.grpc.limits import BURST_SECONDS, MOST_BUCKETS, CallLimits


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def is_taken(limits: CallLimits, method: str = "m", host: str = "10.0.0.1") -> bool:
    try:
        with limits.call(method, host):
            return True
    except KvistError as refusal:
        return (refusal.code, bool(refusal.retry_after_seconds)) != ("OVERLOADED", True)


def test_each_method_has_room_of_its_own() -> None:
    limits = CallLimits(most_at_once=2, most_per_second=0)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(limits.call("m", "a"))
        assert not is_taken(limits)
        assert is_taken(limits, "other")
    assert is_taken(limits)


def test_one_host_cannot_take_all_the_room() -> None:
    limits = CallLimits(most_at_once=8, most_per_second=0)
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(limits.call("m", "greedy"))
        assert not is_taken(limits, host="greedy")
        assert is_taken(limits, "other", host="greedy")
        for _ in range(2):
            stack.enter_context(limits.call("m", "modest"))
        # Now it is the room of all that is full.
        assert not is_taken(limits, host="third")
    assert is_taken(limits, host="greedy")
    assert not limits._running_of_host


def test_a_call_that_fails_gives_its_room_back() -> None:
    limits = CallLimits(most_at_once=1, most_per_second=0)
    with pytest.raises(ZeroDivisionError), limits.call("m", "a"):
        raise ZeroDivisionError
    assert is_taken(limits)


def test_a_host_that_asks_too_often_waits_and_the_others_do_not() -> None:
    clock = Clock()
    limits = CallLimits(most_at_once=1, most_per_second=10, clock=clock)
    assert [True] * int(10 * BURST_SECONDS) + [False] == [is_taken(limits) for _ in range(int(10 * BURST_SECONDS) + 1)]
    assert is_taken(limits, host="10.0.0.2")
    assert is_taken(limits, "other")
    clock.now += 0.11
    assert [True, False] == [is_taken(limits) for _ in range(2)]
    clock.now += 3_600
    assert [True] * int(10 * BURST_SECONDS) + [False] == [is_taken(limits) for _ in range(int(10 * BURST_SECONDS) + 1)]


def test_methods_of_the_data_plane_are_not_paced() -> None:
    limits = CallLimits(most_at_once=1, most_per_second=1, unpaced={"m"}, clock=Clock())
    assert all(is_taken(limits) for _ in range(100))


def test_the_memory_of_hosts_is_bounded() -> None:
    limits = CallLimits(most_at_once=1, most_per_second=1, clock=Clock())
    for number in range(2 * MOST_BUCKETS):
        assert is_taken(limits, host=str(number))
    assert len(limits._buckets) == MOST_BUCKETS
