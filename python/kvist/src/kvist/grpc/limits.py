"""How many calls a server takes: of each method at once, over all hosts and from one, and from one host in a second.

A caller that asks without end, by a fault or on purpose, is told to come back later, and the others notice nothing.
What a call may hold is bounded by the largest message.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from kvist import errors

# A host may ask so many seconds' worth of calls at once: all agents of a relaying controller come together.
BURST_SECONDS = 2.0
# A host may have so much of the room of a method: the rest is for others, whatever it does. Not less, for a controller
# that stands by passes on the sessions of all of its agents.
MOST_OF_ONE_HOST = 0.75
# Hosts that are remembered; the one that was silent for the longest time is forgotten first.
MOST_BUCKETS = 4_096


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at: float


class CallLimits:
    """The limits of one server.

    Args:
        most_at_once: Calls of one method that run.
        most_per_second: Calls of one method from one host; 0 for no limit.
        unpaced: Methods to which that does not apply.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        most_at_once: int,
        most_per_second: float,
        unpaced: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._unpaced = frozenset(unpaced)
        self._most_at_once = most_at_once
        self._most_per_second = most_per_second
        self._clock = clock
        self._most_of_one_host = math.ceil(most_at_once * MOST_OF_ONE_HOST)
        self._running: Counter[str] = Counter()
        # By method and host; none that has no call.
        self._running_of_host: Counter[tuple[str, str]] = Counter()
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()

    @contextlib.contextmanager
    def call(self, method: str, host: str) -> Iterator[None]:
        """A call, for as long as it runs.

        Raises:
            KvistError: OVERLOADED, when it is one too many; nothing was begun.
        """
        self._take(method, host)
        if self._running[method] >= self._most_at_once:
            raise errors.error(
                "OVERLOADED", f"{self._most_at_once} calls of {method} run already", retry_after_seconds=1.0
            )
        of_host = (method, host)
        if self._running_of_host[of_host] >= self._most_of_one_host:
            raise errors.error(
                "OVERLOADED",
                f"{self._most_of_one_host} calls of {method} from this host run already",
                retry_after_seconds=1.0,
            )
        self._running[method] += 1
        self._running_of_host[of_host] += 1
        try:
            yield
        finally:
            self._running[method] -= 1
            self._running_of_host[of_host] -= 1
            if not self._running_of_host[of_host]:
                del self._running_of_host[of_host]

    def _take(self, method: str, host: str) -> None:
        rate = self._most_per_second
        if rate <= 0 or method in self._unpaced:
            return
        now, most = self._clock(), max(1.0, rate * BURST_SECONDS)
        bucket = self._buckets.setdefault((method, host), _Bucket(most, now))
        self._buckets.move_to_end((method, host))
        if len(self._buckets) > MOST_BUCKETS:
            self._buckets.popitem(last=False)
        bucket.tokens = min(most, bucket.tokens + (now - bucket.filled_at) * rate)
        bucket.filled_at = now
        if bucket.tokens < 1.0:
            raise errors.error(
                "OVERLOADED",
                f"more than {rate:g} calls of {method} a second come from this host",
                retry_after_seconds=(1.0 - bucket.tokens) / rate,
            )
        bucket.tokens -= 1.0
