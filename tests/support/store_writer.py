"""A process of its own that counts in a state store.

`python store_writer.py TIMES sqlite PATH`, or `python store_writer.py TIMES etcd ENDPOINT NAMESPACE`.
"""

import asyncio
import sys
from pathlib import Path

from kvist.etcd import EtcdOptions, EtcdStore
from kvist.store import Compare, Put, StateStore
from kvist.store.sqlite import SqliteStore


async def count(opened: StateStore, times: int) -> None:
    """Adds one to `/counter`, so many times, by compare-and-swap."""
    async with opened as store:
        for _ in range(times):
            while True:
                found = await store.get("/counter")
                value = int(found.value) if found else 0
                condition = Compare("/counter", mod_revision=found.mod_revision if found else 0)
                if (await store.commit([Put("/counter", str(value + 1).encode())], when=[condition])).succeeded:
                    break


if __name__ == "__main__":
    times, kind, *place = sys.argv[1:]
    store = SqliteStore(Path(place[0])) if kind == "sqlite" else EtcdStore(EtcdOptions((place[0],)), namespace=place[1])
    asyncio.run(count(store, int(times)))
