"""Lets NIXL's progress thread wait for its sockets where KV goes over TCP. vLLM's workers load it by name.

NIXL's Python library has that thread look at its sockets again at once, for ever: a whole core for each rank, idle or
not. With a time between two looks it waits in poll(2), which a packet ends.

There is no setting for it: `nixl_agent` sets `pthrDelay = 0` on each configuration that it makes. So it is given a
class of configurations on which 0 means `PAUSE_MICROSECONDS`.
"""

import sys
from typing import Any

from nixl._api import nixl_agent

# Whatever NIXL is told, it rounds up to whole milliseconds.
PAUSE_MICROSECONDS = 1_000


def pausing(configuration: type[Any]) -> type[Any]:
    """The same class of configurations, with a pause where none was asked for."""
    delay = configuration.pthrDelay

    class PausingConfiguration(configuration):  # type: ignore[misc]
        @property
        def pthrDelay(self) -> int:  # noqa: N802 -- NIXL's name
            return int(delay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, microseconds: int) -> None:  # noqa: N802
            delay.__set__(self, microseconds or PAUSE_MICROSECONDS)

    return PausingConfiguration


class PausesBetweenLooks:
    """What vLLM mixes into its worker: nothing but the module's effect."""


_bindings = sys.modules[nixl_agent.__module__].nixlBind
_bindings.nixlAgentConfig = pausing(_bindings.nixlAgentConfig)
