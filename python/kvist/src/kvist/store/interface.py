"""What every state store offers: revisions, leases, compare-and-swap transactions, watches with resume.

A revision numbers one committed change of the whole store; it grows by one and never repeats within a store epoch.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

# Limits of every store, so that what a small one takes a large one takes too. etcd's: 128 operations and 1.5 MiB.
MOST_OPERATIONS = 100
LARGEST_VALUE_BYTES = 1024 * 1024
LARGEST_COMMIT_BYTES = LARGEST_VALUE_BYTES + 256 * 1024
# An epoch is the time in microseconds. When the clock has gone back it is this much more than the one before, so that
# epoch plus revision grows all the same.
EPOCH_STEP = 1_000_000_000_000


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key at one revision.

    Attributes:
        key: The key.
        value: Its value.
        create_revision: Revision that made the key; another one after deletion and new creation.
        mod_revision: Revision of the last change.
        lease_id: The key is deleted when this lease ends; 0 for none.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """All keys below a prefix at one revision.

    Attributes:
        revision: The store's revision at which this was true; a watch after it misses nothing.
        items: Ordered by key.
    """

    revision: int
    items: tuple[KeyValue, ...]


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction. All that are set must hold.

    Attributes:
        key: The key it is about.
        mod_revision: Revision of the last change; 0 means that the key must not exist.
        create_revision: Revision that made the key: the fence of a claim.
    """

    key: str
    mod_revision: int | None = None
    create_revision: int | None = None


@dataclass(frozen=True, slots=True)
class Put:
    """Writes a key.

    Attributes:
        key: The key.
        value: Its new value.
        lease_id: The key dies with this lease; 0 detaches it from any.
    """

    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes a key; a missing one is no error."""

    key: str


Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a transaction did.

    Attributes:
        succeeded: Whether all conditions held, so that the operations were done.
        revision: The store's revision afterwards.
    """

    succeeded: bool
    revision: int


class EventType(enum.Enum):
    """What happened to a key."""

    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Event:
    """One change of one key.

    Attributes:
        type: What happened.
        key: To which key.
        value: The new value; empty for a deletion.
        revision: In which revision.
    """

    type: EventType
    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes in order of their revisions; all changes of one revision are in one batch.

    Attributes:
        revision: Everything up to this revision has been seen; resume after it.
        events: The changes; may be empty.
    """

    revision: int
    events: tuple[Event, ...]


class StoreError(Exception):
    """The store could not do it. Whether a write was done is unknown: read again."""


class CompactedError(StoreError):
    """The history after the wanted revision is gone: list again, then watch after the listing."""


class LeaseGoneError(StoreError):
    """The lease has ended."""


class UnknownOutcomeError(StoreError):
    """A write was sent and not answered: it may have been done."""


class TooLargeError(StoreError):
    """A key, a value or a transaction is larger than every store takes. Nothing was written."""


class StoreFullError(StoreError):
    """The store has no space left and takes no writes until somebody makes some. Nothing was written."""


class AccessError(StoreError):
    """The store does not let this process in, or not to this key."""


class StoreRestoredError(StoreError):
    """The store went back to an older state, and has begun a new epoch: read everything again."""


def check_commit(operations: Sequence[Operation], when: Sequence[Compare]) -> None:
    """Holds a transaction against what every store takes.

    Raises:
        ValueError: A key is touched twice.
        TooLargeError: It is too large.
    """
    touched = [operation.key for operation in operations]
    if len(set(touched)) != len(touched):
        raise ValueError("a transaction touches each key once")
    if max(len(operations), len(when)) > MOST_OPERATIONS:
        raise TooLargeError(f"a transaction has at most {MOST_OPERATIONS} operations")
    total_bytes = 0
    for operation in operations:
        value_bytes = len(operation.value) if isinstance(operation, Put) else 0
        if value_bytes > LARGEST_VALUE_BYTES:
            raise TooLargeError(f"the value of {operation.key} has {value_bytes} bytes, of {LARGEST_VALUE_BYTES}")
        total_bytes += value_bytes + len(operation.key.encode())
    if total_bytes > LARGEST_COMMIT_BYTES:
        raise TooLargeError(f"a transaction has {total_bytes} bytes, of {LARGEST_COMMIT_BYTES}")


class StateStore(abc.ABC):
    """A store; used as `async with`."""

    @abc.abstractmethod
    async def __aenter__(self) -> Self:
        """Opens the store."""

    @abc.abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes it. Leases live on until they expire."""

    @property
    @abc.abstractmethod
    def epoch(self) -> int:
        """Made when the store was made or restored; a greater one is newer whatever the revision."""

    @abc.abstractmethod
    async def get(self, key: str) -> KeyValue | None:
        """One key; none when it does not exist."""

    @abc.abstractmethod
    async def list(self, prefix: str) -> Listing:
        """All keys below a prefix, at one revision."""

    @abc.abstractmethod
    async def commit(self, operations: Sequence[Operation], *, when: Sequence[Compare] = ()) -> Outcome:
        """Does all operations in one revision if all conditions hold, else nothing.

        Raises:
            LeaseGoneError: A put names a lease that has ended.
        """

    @abc.abstractmethod
    def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[Batch, None]:
        """Yields changes below a prefix after a revision, for ever.

        Raises:
            CompactedError: The history after the revision is gone.
        """

    @abc.abstractmethod
    async def grant_lease(self, ttl_seconds: float) -> int:
        """Makes a lease and returns its id. It expires unless it is kept alive."""

    @abc.abstractmethod
    async def keep_alive(self, lease_id: int) -> None:
        """Gives a lease its whole time again.

        Raises:
            LeaseGoneError: It has ended.
        """

    @abc.abstractmethod
    async def revoke_lease(self, lease_id: int) -> None:
        """Ends a lease and deletes its keys. Idempotent."""

    @abc.abstractmethod
    async def declare_restored(self) -> int:
        """Starts a new epoch, after the store was restored from a backup; returns it."""

    async def put(self, key: str, value: bytes, *, lease_id: int = 0) -> int:
        """Writes one key and returns the revision."""
        return (await self.commit([Put(key, value, lease_id)])).revision

    async def delete(self, key: str) -> int:
        """Deletes one key and returns the store's revision."""
        return (await self.commit([Delete(key)])).revision
