"""How much of the machine others use, so that limits in seconds mean what they say on a busy one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import psutil

# Below this share of the machine a limit in seconds says nothing any more.
LEAST_SHARE = 0.1
# Processor time is counted in hundredths of a second.
LEAST_WINDOW_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """Processor seconds since the machine's start.

    Attributes:
        at: When, on a clock that only goes forward.
        total: Of all processors.
        busy: In which somebody ran.
        own: Of the processes that were named and lived, by process id.
    """

    at: float
    total: float
    busy: float
    own: Mapping[int, float]

    @classmethod
    def now(cls, process_ids: Collection[int]) -> MachineLoad:
        """The seconds until now."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Time of guests is part of that of users.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        own = {}
        for process_id in process_ids:
            with contextlib.suppress(psutil.NoSuchProcess):
                spent = psutil.Process(process_id).cpu_times()
                own[process_id] = spent.user + spent.system
        return cls(time.monotonic(), total, total - idle, own)

    async def share_left_by_others(self, process_ids: Collection[int]) -> float:
        """The part of the machine that others have left to these processes since this moment.

        What was over sooner than it can be told is judged by a second.
        """
        await asyncio.sleep(max(0.0, self.at + LEAST_WINDOW_SECONDS - time.monotonic()))
        now = MachineLoad.now(process_ids)
        # What a process spent that has ended meanwhile counts as if others had.
        own = sum(spent - self.own.get(process_id, 0.0) for process_id, spent in now.own.items())
        others = (now.busy - self.busy) - own
        return max(LEAST_SHARE, 1.0 - max(0.0, others) / (now.total - self.total))
