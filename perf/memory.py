"""What a router's memory is made of: the index, the tokenizer, and all the rest."""

import asyncio
import sys
from dataclasses import dataclass

from perf.mesh import Mesh, router_metrics, value_of
from perf.processes import ProcessFailedError

_MEBIBYTE = 1024**2


@dataclass(frozen=True, slots=True)
class RouterMemory:
    """Mebibytes of one router.

    Attributes:
        resident: What the kernel counts.
        index: What its index says that it takes, and the one of its recent decisions.
        tokenizer: By how much another process grows that loads the same tokenizer and uses it on as many threads.
    """

    resident: float
    index: float
    tokenizer: float

    @property
    def rest(self) -> float:
        """Code, Python, connections, requests: all that grows with neither models nor caches."""
        return self.resident - self.index - self.tokenizer


async def router_memory(mesh: Mesh, *, threads: int) -> RouterMemory:
    """Measures a router that has loaded one tokenizer and uses it on so many threads.

    Raises:
        ProcessFailedError: The tokenizer could not be measured.
    """
    metrics = await router_metrics(mesh)
    index = value_of(metrics, "kvist_index_bytes") + value_of(metrics, "kvist_index_recent_bytes")
    command = [sys.executable, "-m", "perf.tokenizer_process", mesh.worker_address, str(threads)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    if process.returncode != 0:
        raise ProcessFailedError("the memory of the tokenizer could not be measured")
    return RouterMemory(mesh.router.resident_bytes() / _MEBIBYTE, index / _MEBIBYTE, int(said) / _MEBIBYTE)
