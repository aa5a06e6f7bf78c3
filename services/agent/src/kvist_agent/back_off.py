"""When a dead worker is started again."""

FIRST_DELAY_SECONDS = 0.2
LONGEST_DELAY_SECONDS = 30.0
# A worker that was healthy for this long starts its back-off anew.
HEALTHY_SECONDS = 60.0


class RestartBackOff:
    """Delays of one worker slot: none, then 0.2 s, doubling to 30 s; anew after a minute of health."""

    def __init__(self) -> None:
        self._failures = 0

    def next_delay_seconds(self, *, healthy_seconds: float) -> float:
        """How long to wait after a death.

        Args:
            healthy_seconds: How long the process that died had been ready; 0 when it never was.
        """
        if healthy_seconds >= HEALTHY_SECONDS:
            self._failures = 0
        self._failures += 1
        if self._failures == 1:
            return 0.0
        # The exponent is bounded: a slot that failed for weeks must not overflow a float.
        doublings = min(self._failures - 2, 16)
        return min(FIRST_DELAY_SECONDS * 2.0**doublings, LONGEST_DELAY_SECONDS)
