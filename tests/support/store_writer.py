"""A process of its own that counts in a state store: `python store_writer.py PATH TIMES`."""

import asyncio
import sys
from pathlib import Path

from kvist.store import Compare, Put
from kvist.store.sqlite import SqliteStore


async def count(path: Path, times: int) -> None:
    """Adds one to `/counter`, so many times, by compare-and-swap."""
    async with SqliteStore(path) as store:
        for _ in range(times):
            while True:
                found = await store.get("/counter")
                value = int(found.value) if found else 0
                condition = Compare("/counter", mod_revision=found.mod_revision if found else 0)
                if (await store.commit([Put("/counter", str(value + 1).encode())], when=[condition])).succeeded:
                    break


if __name__ == "__main__":
    asyncio.run(count(Path(sys.argv[1]), int(sys.argv[2])))
