"""Which processor cores run what.

Router CPU per request is what a router costs, not what its neighbours cost it: when client and router share a core,
each write to the client lets the client run at once, and the router pays for two changes of task. So the router has
cores of its own, as it has where its clients are on other machines.
"""

import os
from collections.abc import Set as AbstractSet
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """Two sets of cores.

    Attributes:
        router: Cores of the router, which starts a thread for each.
        others: Cores of client, workers, NATS and relay.
    """

    router: AbstractSet[int]
    others: AbstractSet[int]


def placement(cores: AbstractSet[int], *, is_shared: bool = False) -> Placement:
    """The first half for the router, the second for all others; everything for both where there is one core alone."""
    ordered = sorted(cores)
    half = len(ordered) // 2
    if is_shared or half == 0:
        return Placement(frozenset(cores), frozenset(cores))
    return Placement(frozenset(ordered[:half]), frozenset(ordered[half:]))


def usable_cores() -> AbstractSet[int]:
    """The cores that this process may use."""
    return frozenset(os.sched_getaffinity(0))
