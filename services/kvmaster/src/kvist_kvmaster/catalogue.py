"""The catalogue of named prefixes in the state store, written by the KV master that leads, under its fence."""

import asyncio
import re
from collections.abc import Callable

from kvist.changes import Changes
from kvist.errors import FieldViolation, PreconditionError, UnavailableError, error, invalid
from kvist.kvmaster.v1.kvmaster_pb2 import NamedPrefix
from kvist.store import Delete, Put, StateStore, StoreError
from kvist.store.election import Leadership
from kvist.store.mirror import Mirror

MOST_PREFIXES = 1_000
MOST_BLOCKS = 16_384
MOST_CHARACTERS = 1_000
# An answer to a write waits at most so long for its own reading to show it.
SETTLE_SECONDS = 2.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Catalogue:
    """Named prefixes, as the store has them. Every instance reads; the leader writes."""

    def __init__(self, store: StateStore, prefix: str, *, unix_nanoseconds: Callable[[], int]) -> None:
        self._store = store
        self._prefix = prefix
        self._unix_nanoseconds = unix_nanoseconds
        self._changes = Changes()
        self._mirror = Mirror(store, prefix, on_change=lambda _events: self._changes.announce())

    async def run(self) -> None:
        """Follows the store for ever."""
        await self._mirror.run()

    def names(self) -> list[str]:
        """All names, in order.

        Raises:
            KvistError: NOT_READY, when the store was never read.
        """
        if not self._mirror.revision:
            raise error("NOT_READY", "the catalogue was not read yet", retry_after_seconds=0.5)
        return sorted(key.removeprefix(self._prefix) for key in self._mirror.contents)

    def get(self, name: str) -> NamedPrefix | None:
        """One prefix; none when there is none."""
        found = self._mirror.contents.get(self._prefix + name)
        return None if found is None else NamedPrefix.FromString(found.value)

    async def put(self, prefix: NamedPrefix, leadership: Leadership) -> NamedPrefix:
        """Writes a prefix; equal content is not written again.

        Raises:
            KvistError: It is not right, there are too many, the store does not answer, or somebody else leads.
        """
        check(prefix)
        names = self.names()
        present = self.get(prefix.name)
        wanted = NamedPrefix()
        wanted.CopyFrom(prefix)
        if present is not None:
            wanted.updated_at.CopyFrom(present.updated_at)
            if wanted == present:
                return present
        elif len(names) >= MOST_PREFIXES:
            raise PreconditionError(f"there are {MOST_PREFIXES} named prefixes already")
        wanted.updated_at.FromNanoseconds(self._unix_nanoseconds())
        await self._commit(Put(self._prefix + prefix.name, wanted.SerializeToString()), leadership)
        return wanted

    async def delete(self, name: str, leadership: Leadership) -> None:
        """Forgets a prefix; a missing one is no error."""
        if not _NAME.fullmatch(name):
            raise invalid([_bad_name("name")])
        await self._commit(Delete(self._prefix + name), leadership)

    async def _commit(self, operation: Put | Delete, leadership: Leadership) -> None:
        try:
            revision = (await leadership.commit(self._store, [operation])).revision
        except StoreError as failure:
            raise UnavailableError("the state store does not answer; the change may still be made") from failure
        # Who lists here next sees it.
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                while self._mirror.revision < revision:
                    await self._changes.after(self._changes.number)
        except TimeoutError:
            return


def check(prefix: NamedPrefix) -> None:
    """Holds a prefix against what the catalogue takes.

    Raises:
        InvalidRequestError: With all that is wrong.
    """
    violations = []
    if not _NAME.fullmatch(prefix.name):
        violations.append(_bad_name("prefix.name"))
    if not prefix.namespace or len(prefix.namespace) > MOST_CHARACTERS:
        violations.append(FieldViolation("prefix.namespace", f"is required, of at most {MOST_CHARACTERS} characters"))
    if not 0 < len(prefix.block_hashes) <= MOST_BLOCKS:
        violations.append(FieldViolation("prefix.block_hashes", f"must be 1 to {MOST_BLOCKS}"))
    if len(prefix.description) > MOST_CHARACTERS:
        violations.append(FieldViolation("prefix.description", f"must have at most {MOST_CHARACTERS} characters"))
    if violations:
        raise invalid(violations)


def _bad_name(field: str) -> FieldViolation:
    return FieldViolation(field, "must be 1 to 128 of A-Z, a-z, 0-9, `.`, `_` and `-`")
