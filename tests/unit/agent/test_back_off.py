"""Restart delays."""

from itertools import pairwise

from kvist_agent.back_off import HEALTHY_SECONDS, LONGEST_DELAY_SECONDS, RestartBackOff


def test_the_first_restart_comes_at_once_then_delays_double_to_the_longest() -> None:
    back_off = RestartBackOff()
    delays = [back_off.next_delay_seconds(healthy_seconds=0.0) for _ in range(50)]
    assert delays[:5] == [0.0, 0.2, 0.4, 0.8, 1.6]
    assert delays[-1] == LONGEST_DELAY_SECONDS
    assert all(earlier <= later for earlier, later in pairwise(delays))


def test_health_starts_the_delays_anew() -> None:
    back_off = RestartBackOff()
    for _ in range(10):
        back_off.next_delay_seconds(healthy_seconds=0.0)
    assert back_off.next_delay_seconds(healthy_seconds=HEALTHY_SECONDS) == 0.0
    assert back_off.next_delay_seconds(healthy_seconds=HEALTHY_SECONDS - 1) == 0.2
