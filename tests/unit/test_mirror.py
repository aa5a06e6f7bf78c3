"""A mirror that its watch has told too little."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvist.store import EventType
from kvist.store.mirror import Mirror, Mirrored
from kvist.store.sqlite import SqliteStore

LIMIT_SECONDS = 30


class Seen:
    def __init__(self, store: SqliteStore) -> None:
        self.events: list[tuple[EventType, str]] = []
        self.differences: list[int] = []
        self.store = store
        self.mirror = Mirror(
            store,
            "/",
            on_change=lambda events: self.events.extend((event.type, event.key) for event in events),
            on_difference=self.differences.append,
        )

    async def until_at(self, revision: int) -> None:
        while self.mirror.revision < revision:
            await asyncio.sleep(0.01)


@pytest.fixture
async def seen(tmp_path: Path) -> AsyncIterator[Seen]:
    async with asyncio.timeout(LIMIT_SECONDS), SqliteStore(tmp_path / "s") as store:
        seen = Seen(store)
        task = asyncio.create_task(seen.mirror.run())
        yield seen
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_comparison_ends_ghosts_and_brings_what_is_missing(seen: Seen) -> None:
    for key in ("/lost", "/kept", "/old"):
        revision = await seen.store.put(key, b"1")
    await seen.until_at(revision)
    contents = seen.mirror.contents
    del contents["/lost"]
    contents["/ghost"] = Mirrored(b"1", revision)
    contents["/old"] = Mirrored(b"0", revision - 1)
    seen.events.clear()
    await seen.mirror.compare()
    assert [3] == seen.differences
    assert {(EventType.DELETE, "/ghost"), (EventType.PUT, "/lost"), (EventType.PUT, "/old")} == set(seen.events)
    assert {"/lost": b"1", "/kept": b"1", "/old": b"1"} == {key: item.value for key, item in contents.items()}
    await seen.mirror.compare()
    assert [3] == seen.differences


async def test_what_changes_meanwhile_is_no_difference(seen: Seen) -> None:
    is_over = False

    async def write() -> None:
        number = 0
        while not is_over:
            number += 1
            await seen.store.put(f"/{number % 5}", str(number).encode())
            if number % 3 == 0:
                await seen.store.delete(f"/{number % 5}")

    writing = asyncio.create_task(write())
    for _ in range(50):
        await seen.mirror.compare()
    is_over = True
    await writing
    assert [] == seen.differences
