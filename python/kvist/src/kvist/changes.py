"""Waiting for a change without missing one and without queueing any."""

import asyncio


class Changes:
    """A number that grows with each change, and a way to wait for a larger one.

    A waiter that is slow sees one change instead of many: what it reads then is the present.
    """

    def __init__(self) -> None:
        self._number = 0
        self._event = asyncio.Event()

    @property
    def number(self) -> int:
        """Changes so far."""
        return self._number

    def announce(self) -> None:
        """States that something has changed."""
        self._number += 1
        self._event.set()
        self._event = asyncio.Event()

    async def after(self, number: int) -> int:
        """Waits until more changes than `number` have been announced, and returns how many have."""
        while self._number <= number:
            await self._event.wait()
        return self._number
