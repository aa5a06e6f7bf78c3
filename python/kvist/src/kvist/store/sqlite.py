"""The embedded state store: one SQLite file in WAL mode, shared by the processes of one machine.

Why not a server: the embedded cluster must start with nothing installed. What is given up against etcd is another
machine; what is kept is the contract: one revision a commit, compare-and-swap, leases, watches that resume.

Other processes' commits are seen by polling `PRAGMA data_version`, which costs microseconds. Lease times are those of
the monotonic clock, which all processes of a machine share and which stands still while a laptop sleeps; after a reboot
all leases of the boot before have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import psutil

from kvist.store.interface import (
    EPOCH_STEP,
    Batch,
    CompactedError,
    Compare,
    Delete,
    Event,
    EventType,
    KeyValue,
    LeaseGoneError,
    Listing,
    Operation,
    Outcome,
    Put,
    StateStore,
    StoreError,
    StoreFullError,
    check_commit,
)

POLL_SECONDS = 0.025
BUSY_TIME_LIMIT_SECONDS = 5.0
# Revisions of history that watches can resume from.
KEPT_REVISIONS = 10_000
# The history is cut this many revisions late, so that cutting is rare.
_COMPACTION_SLACK = 1_000
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID",
    """CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value BLOB NOT NULL, create_revision INTEGER NOT NULL,
       mod_revision INTEGER NOT NULL, lease_id INTEGER NOT NULL) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS entries_by_lease ON entries (lease_id) WHERE lease_id != 0",
    """CREATE TABLE IF NOT EXISTS history (revision INTEGER NOT NULL, key TEXT NOT NULL, value BLOB,
       PRIMARY KEY (revision, key)) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS leases (id INTEGER PRIMARY KEY AUTOINCREMENT, ttl REAL NOT NULL, ends REAL NOT NULL)",
)
# The disk is full, or a file may grow no further.
_WITHOUT_ROOM = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE})
_ENTRY_COLUMNS = "key, value, create_revision, mod_revision, lease_id"
_T = TypeVar("_T")


class SqliteStore(StateStore):
    """A state store in a file. Several processes may open the same file."""

    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.monotonic, kept_revisions: int = KEPT_REVISIONS
    ) -> None:
        self.path = path
        self._clock = clock
        self._kept_revisions = kept_revisions
        # SQLite blocks, so all its work is on one thread; a connection of its own would gain nothing.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvist-store")
        self._connection: sqlite3.Connection | None = None
        self._epoch = 0
        self._seen_state = (-1, -1)
        self._poller: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._closed = threading.Event()

    # Life.

    async def __aenter__(self) -> Self:
        self._epoch = await self._on_thread(self._open)
        self._poller = asyncio.create_task(self._poll(), name="kvist-store-poll")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()
        if self._poller is not None:
            self._poller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poller
        self._wake()
        if self._connection is not None:
            await self._on_thread(self._connection.close)
            self._connection = None
        self._executor.shutdown(wait=False)

    @property
    def epoch(self) -> int:
        """Microseconds of the Unix time when the file was made or last declared restored."""
        return self._epoch

    # Reads.

    async def get(self, key: str) -> KeyValue | None:
        """One key; none when it does not exist."""

        def read() -> KeyValue | None:
            row = self._db.execute(f"SELECT {_ENTRY_COLUMNS} FROM entries WHERE key = ?", (key,)).fetchone()  # noqa: S608
            return KeyValue(*row) if row else None

        return await self._on_thread(read)

    async def list(self, prefix: str) -> Listing:
        """All keys below a prefix, at one revision."""

        def read() -> Listing:
            with self._transaction("DEFERRED"):
                revision = self._meta("revision")
                condition, bounds = _prefix_range(prefix)
                rows = self._db.execute(
                    f"SELECT {_ENTRY_COLUMNS} FROM entries WHERE {condition} ORDER BY key",  # noqa: S608
                    bounds,
                ).fetchall()
            return Listing(revision, tuple(KeyValue(*row) for row in rows))

        return await self._on_thread(read)

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[Batch, None]:
        """Yields changes below a prefix after a revision, for ever."""
        position = after_revision
        while True:
            changed = self._changed
            batch = await self._on_thread(partial(self._changes, prefix, position))
            if batch.revision > position:
                position = batch.revision
                yield batch
                continue
            await changed.wait()
            if self._failure is not None:
                raise StoreError("the store cannot be read") from self._failure
            if self._closed.is_set():
                raise StoreError("the store was closed")

    # Writes.

    async def commit(self, operations: Sequence[Operation], *, when: Sequence[Compare] = ()) -> Outcome:
        """Does all operations in one revision if all conditions hold, else nothing."""
        check_commit(operations, when)

        def write() -> Outcome:
            with self._transaction("IMMEDIATE"):
                self._expire()
                if not all(self._holds(compare) for compare in when):
                    return Outcome(succeeded=False, revision=self._meta("revision"))
                for operation in operations:
                    if isinstance(operation, Put) and operation.lease_id:
                        self._require_lease(operation.lease_id)
                return Outcome(succeeded=True, revision=self._apply(operations))

        outcome = await self._on_thread(write)
        self._wake()
        return outcome

    async def grant_lease(self, ttl_seconds: float) -> int:
        """Makes a lease and returns its id."""
        if ttl_seconds <= 0:
            raise ValueError("a lease lives longer than nothing")

        def write() -> int:
            with self._transaction("IMMEDIATE"):
                cursor = self._db.execute(
                    "INSERT INTO leases (ttl, ends) VALUES (?, ?)", (ttl_seconds, self._clock() + ttl_seconds)
                )
                return int(cursor.lastrowid or 0)

        return await self._on_thread(write)

    async def keep_alive(self, lease_id: int) -> None:
        """Gives a lease its whole time again."""

        def write() -> None:
            with self._transaction("IMMEDIATE"):
                self._expire()
                self._require_lease(lease_id)
                self._db.execute("UPDATE leases SET ends = ? + ttl WHERE id = ?", (self._clock(), lease_id))

        await self._on_thread(write)

    async def revoke_lease(self, lease_id: int) -> None:
        """Ends a lease and deletes its keys. Idempotent."""

        def write() -> None:
            with self._transaction("IMMEDIATE"):
                self._end_leases([lease_id])

        await self._on_thread(write)
        self._wake()

    async def declare_restored(self) -> int:
        """Starts a new epoch, after the file was replaced by an older copy; returns it."""

        def write() -> int:
            with self._transaction("IMMEDIATE"):
                epoch = max(_unix_microseconds(), self._meta("epoch") + EPOCH_STEP)
                self._set_meta("epoch", epoch)
                return epoch

        self._epoch = await self._on_thread(write)
        return self._epoch

    # On the thread.

    @property
    def _db(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StoreError("the store is not open")
        return self._connection

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIME_LIMIT_SECONDS, isolation_level=None, check_same_thread=False
        )
        self._connection = connection
        # Changing the journal mode does not wait for a lock by itself, so two processes that start together retry.
        deadline = time.monotonic() + BUSY_TIME_LIMIT_SECONDS
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL").fetchone()
                break
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        # A power cut may lose the last commits but breaks nothing: whoever saw them has lost power too.
        connection.execute("PRAGMA synchronous = NORMAL")
        boot = _boot_id()
        with self._transaction("IMMEDIATE"):
            for statement in _SCHEMA:
                connection.execute(statement)
            for name, value in (("revision", 0), ("compacted", 0), ("epoch", _unix_microseconds()), ("boot", boot)):
                connection.execute("INSERT OR IGNORE INTO meta (name, value) VALUES (?, ?)", (name, value))
            if self._read_meta("boot") != boot:
                self._end_leases([row[0] for row in connection.execute("SELECT id FROM leases")])
                self._set_meta("boot", boot)
            return self._meta("epoch")

    @contextlib.contextmanager
    def _transaction(self, kind: str) -> Iterator[None]:
        connection = self._db
        connection.execute(f"BEGIN {kind}")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            # A full disk has rolled back already.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _read_meta(self, name: str) -> int | str:
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        value: int | str = row[0]
        return value

    def _meta(self, name: str) -> int:
        return int(self._read_meta(name))

    def _set_meta(self, name: str, value: int | str) -> None:
        self._db.execute("UPDATE meta SET value = ? WHERE name = ?", (value, name))

    def _holds(self, compare: Compare) -> bool:
        row = self._db.execute(
            "SELECT mod_revision, create_revision FROM entries WHERE key = ?", (compare.key,)
        ).fetchone()
        mod_revision, create_revision = row or (0, 0)
        return compare.mod_revision in (None, mod_revision) and compare.create_revision in (None, create_revision)

    def _require_lease(self, lease_id: int) -> None:
        if self._db.execute("SELECT 1 FROM leases WHERE id = ?", (lease_id,)).fetchone() is None:
            raise LeaseGoneError(f"lease {lease_id} has ended")

    def _apply(self, operations: Sequence[Operation]) -> int:
        """Writes one revision; deletions of missing keys alone make none."""
        last = self._meta("revision")
        revision = last + 1
        changed = False
        for operation in operations:
            if isinstance(operation, Put):
                self._db.execute(
                    """INSERT INTO entries VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET
                       value = excluded.value, mod_revision = excluded.mod_revision, lease_id = excluded.lease_id""",
                    (operation.key, operation.value, revision, revision, operation.lease_id),
                )
                value: bytes | None = operation.value
            elif self._db.execute("DELETE FROM entries WHERE key = ?", (operation.key,)).rowcount:
                value = None
            else:
                continue
            changed = True
            self._db.execute("INSERT INTO history VALUES (?, ?, ?)", (revision, operation.key, value))
        if not changed:
            return last
        self._set_meta("revision", revision)
        compacted = revision - self._kept_revisions
        if compacted >= self._meta("compacted") + min(_COMPACTION_SLACK, self._kept_revisions):
            self._db.execute("DELETE FROM history WHERE revision <= ?", (compacted,))
            self._set_meta("compacted", compacted)
        return revision

    def _end_leases(self, lease_ids: Sequence[int]) -> None:
        keys: list[str] = []
        for lease_id in lease_ids:
            keys += [row[0] for row in self._db.execute("SELECT key FROM entries WHERE lease_id = ?", (lease_id,))]
            self._db.execute("DELETE FROM leases WHERE id = ?", (lease_id,))
        self._apply([Delete(key) for key in keys])

    def _expired(self) -> Sequence[int]:
        return [row[0] for row in self._db.execute("SELECT id FROM leases WHERE ends <= ?", (self._clock(),))]

    def _expire(self) -> None:
        lease_ids = self._expired()
        if lease_ids:
            self._end_leases(lease_ids)

    def _changes(self, prefix: str, after_revision: int) -> Batch:
        with self._transaction("DEFERRED"):
            revision = self._meta("revision")
            if after_revision < self._meta("compacted"):
                raise CompactedError(f"the history after revision {after_revision} is gone")
            condition, bounds = _prefix_range(prefix)
            rows = self._db.execute(
                f"SELECT key, value, revision FROM history WHERE revision > ? AND {condition} ORDER BY revision, key",  # noqa: S608
                (after_revision, *bounds),
            ).fetchall()
        events = (
            Event(EventType.DELETE if value is None else EventType.PUT, key, value or b"", at)
            for key, value, at in rows
        )
        return Batch(revision, tuple(events))

    def _look(self) -> bool:
        """Ends expired leases, and says whether the file has changed since the last look."""
        if self._expired():
            try:
                with self._transaction("IMMEDIATE"):
                    self._expire()
            except sqlite3.Error as failure:
                # A full disk takes no deletion either. What the file holds can be read, and does not change until then.
                if failure.sqlite_errorcode not in _WITHOUT_ROOM:
                    raise
            else:
                return True
        # The first number moves with commits of other connections, the second with those of this one.
        state = (self._db.execute("PRAGMA data_version").fetchone()[0], self._db.total_changes)
        changed = state != self._seen_state
        self._seen_state = state
        return changed

    # On the loop.

    async def _on_thread(self, work: Callable[[], _T]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except sqlite3.Error as failure:
            if getattr(failure, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise StoreFullError(f"there is no room for the store: {failure}") from failure
            raise StoreError(f"the store failed: {failure}") from failure
        except RuntimeError as failure:
            if self._closed.is_set():
                raise StoreError("the store was closed") from failure
            raise

    async def _poll(self) -> None:
        busy_failures = 0
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                if await self._on_thread(self._look):
                    self._wake()
                busy_failures = 0
                self._failure = None
            except StoreError as failure:
                # Each failure has waited for the whole time limit of a busy file: watchers must know.
                busy_failures += 1
                if busy_failures > 1:
                    self._failure = failure
                    self._wake()

    def _wake(self) -> None:
        """Lets all watches look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _prefix_range(prefix: str) -> tuple[str, tuple[str, ...]]:
    """The SQL condition for keys below a prefix, and its parameters."""
    # U+10FFFF sorts after every character that a key may hold.
    return ("key >= ? AND key < ?", (prefix, prefix + "\U0010ffff")) if prefix else ("1", ())


def _unix_microseconds() -> int:
    return time.time_ns() // 1_000


def _boot_id() -> str:
    """Names the present boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(int(psutil.boot_time()))
