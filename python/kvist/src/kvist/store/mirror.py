"""What lies below a prefix of a state store, kept in memory and never silently behind.

A mirror lists, watches after the listing, and lists again whenever the watch says that history was cut or the store
could not be read. What a new listing lacks is given as deletions, so that nobody keeps what is gone. Now and then it
also compares all that it has with a new listing: what a watch should have told and did not is no ghost for ever. While
the store does not answer the last known contents stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvist import telemetry
from kvist.store.interface import CompactedError, Event, EventType, Listing, StateStore, StoreError

FIRST_RETRY_SECONDS = 0.1
LONGEST_RETRY_SECONDS = 2.0
COMPARISON_SECONDS = 60.0
# A watch learns of revisions without changes for it when it asks for progress, every two seconds.
CATCH_UP_SECONDS = 10.0

_log = telemetry.logger(__name__)


@dataclass(frozen=True, slots=True)
class Mirrored:
    """One key as last seen.

    Attributes:
        value: Its value.
        revision: Of its last change.
    """

    value: bytes
    revision: int


class Mirror:
    """Follows a prefix.

    Args:
        store: The store.
        prefix: Of the keys.
        on_change: Called with each group of changes after the contents hold them; also with none, when the store
            answers for the first time or again.
        on_difference: Called with how many keys were not as the store has them.
    """

    def __init__(
        self,
        store: StateStore,
        prefix: str,
        *,
        on_change: Callable[[Sequence[Event]], None],
        on_difference: Callable[[int], None] = lambda _keys: None,
    ) -> None:
        self.contents: dict[str, Mirrored] = {}
        self.revision = 0
        # Whether the contents follow the store at this moment.
        self.is_current = False
        self._store = store
        self._prefix = prefix
        self._on_change = on_change
        self._on_difference = on_difference
        self._moved = asyncio.Event()

    async def run(self) -> None:
        """Follows for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._compare_now_and_then())
            await self._follow()

    async def compare(self) -> None:
        """Compares everything with a new listing, and takes what differs from there.

        Raises:
            StoreError: The store does not answer.
        """
        listing = await self._store.list(self._prefix)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_SECONDS):
                while self.revision < listing.revision:
                    self._moved.clear()
                    await self._moved.wait()
        # A mirror that has moved on says nothing about the listing; the next comparison comes.
        if not self.is_current or self.revision != listing.revision:
            return
        listed = {item.key: Mirrored(item.value, item.mod_revision) for item in listing.items}
        different = sorted(
            key for key in self.contents.keys() | listed.keys() if self.contents.get(key) != listed.get(key)
        )
        if different:
            _log.error("mirror_differed", prefix=self._prefix, keys=len(different), first_key=different[0])
            self._on_difference(len(different))
            self._take_listing(listing)

    async def _compare_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(COMPARISON_SECONDS * random.uniform(0.8, 1.2))  # noqa: S311  Jitter, no secret.
            with contextlib.suppress(StoreError):
                await self.compare()

    async def _follow(self) -> None:
        retry_seconds = FIRST_RETRY_SECONDS
        while True:
            try:
                self._take_listing(await self._store.list(self._prefix))
                retry_seconds = FIRST_RETRY_SECONDS
                async with contextlib.aclosing(
                    self._store.watch(self._prefix, after_revision=self.revision)
                ) as batches:
                    async for batch in batches:
                        self._take(batch.events, revision=batch.revision)
            except CompactedError:
                _log.info("mirror_lists_again", prefix=self._prefix, revision=self.revision)
            except StoreError as failure:
                self.is_current = False
                _log.warning("mirror_stands_still", prefix=self._prefix, reason=str(failure))
                await asyncio.sleep(retry_seconds * random.uniform(0.5, 1.0))  # noqa: S311  Jitter, no secret.
                retry_seconds = min(retry_seconds * 2, LONGEST_RETRY_SECONDS)

    def _take_listing(self, listing: Listing) -> None:
        listed = {item.key: item for item in listing.items}
        changes = [
            Event(EventType.DELETE, key, b"", listing.revision) for key in sorted(self.contents.keys() - listed.keys())
        ]
        changes += [
            Event(EventType.PUT, item.key, item.value, item.mod_revision)
            for item in listing.items
            if self.contents.get(item.key) != Mirrored(item.value, item.mod_revision)
        ]
        self._take(changes, revision=listing.revision, is_listing=True)

    def _take(self, events: Sequence[Event], *, revision: int, is_listing: bool = False) -> None:
        self.revision = revision
        self.is_current = True
        self._moved.set()
        for event in events:
            if event.type is EventType.DELETE:
                self.contents.pop(event.key, None)
            else:
                self.contents[event.key] = Mirrored(event.value, event.revision)
        if events or is_listing:
            self._on_change(events)
