"""Leadership over a state store: one leader, and a fence that makes an expired leader's writes fail."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from kvist import errors, telemetry
from kvist.store.interface import (
    CompactedError,
    Compare,
    LeaseGoneError,
    Operation,
    Outcome,
    Put,
    StateStore,
    StoreError,
)

_RETRY_SECONDS = 0.2
_LOG = telemetry.logger("kvist.store.election")


@dataclass(slots=True)
class Leadership:
    """A claim that was won. It is over when `lost` is set, and then never comes back.

    Attributes:
        key: The claim's key.
        create_revision: Revision at which the claim was won; the condition of all writes.
        fence: The store's epoch, in microseconds, plus that revision. It grows from leader to leader and also when the
            store is restored or replaced, since no store makes a revision each microsecond. Commands carry it.
        lease_id: The claim's lease.
        certain_until: Monotonic seconds until which nobody else can lead.
        lost: Set when the claim has ended, or when it can no longer be told to live.
        clock: Monotonic seconds.
    """

    key: str
    create_revision: int
    fence: int
    lease_id: int
    certain_until: float
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    clock: Callable[[], float] = time.monotonic

    @property
    def is_certain(self) -> bool:
        """Whether nobody else can lead yet. A leader that was paused past its lease sees that here before it acts."""
        return not self.lost.is_set() and self.clock() < self.certain_until

    @property
    def guard(self) -> Compare:
        """The condition under which the leader may write."""
        return Compare(self.key, create_revision=self.create_revision)

    async def commit(
        self, store: StateStore, operations: Sequence[Operation], *, when: Sequence[Compare] = ()
    ) -> Outcome:
        """Writes under the fence.

        Raises:
            PreconditionError: Somebody else leads; nothing was written.
        """
        outcome = await store.commit(operations, when=[self.guard, *when])
        if not outcome.succeeded:
            holder = await store.get(self.key)
            if holder is None or holder.create_revision != self.create_revision:
                self.lost.set()
                raise errors.PreconditionError("another leader has taken over", code="STALE_FENCE")
        return outcome


@contextlib.asynccontextmanager
async def lead(
    store: StateStore,
    key: str,
    *,
    identity: str,
    ttl_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Leadership]:
    """Waits until this process leads, yields the claim, and gives it up on leaving.

    Args:
        store: The state store.
        key: Key of the claim; its value is the leader's identity.
        identity: Name of this process, for people.
        ttl_seconds: How long the claim outlives its holder.
        clock: Monotonic seconds.
    """
    leadership = await _campaign(store, key, identity=identity, ttl_seconds=ttl_seconds, clock=clock)
    _LOG.info("leader_elected", key=key, identity=identity, fence=leadership.fence)
    renewal = asyncio.create_task(_renew(store, leadership, ttl_seconds=ttl_seconds), name=f"lead-{key}")
    try:
        yield leadership
    finally:
        renewal.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await renewal
        leadership.lost.set()
        with contextlib.suppress(StoreError):  # The lease ends by itself then.
            await store.revoke_lease(leadership.lease_id)


async def _campaign(
    store: StateStore, key: str, *, identity: str, ttl_seconds: float, clock: Callable[[], float]
) -> Leadership:
    lease_id = 0
    certain_until = 0.0

    def won(revision: int) -> Leadership:
        return Leadership(key, revision, store.epoch + revision, lease_id, certain_until, clock=clock)

    while True:
        try:
            holder = await store.get(key)
            if holder is not None and holder.lease_id == lease_id != 0:
                # A claim whose outcome was unknown was made after all.
                return won(holder.create_revision)
            if holder is None:
                if not lease_id:
                    certain_until = clock() + ttl_seconds
                    lease_id = await store.grant_lease(ttl_seconds)
                outcome = await store.commit(
                    [Put(key, identity.encode(), lease_id)], when=[Compare(key, mod_revision=0)]
                )
                if outcome.succeeded:
                    return won(outcome.revision)
                continue
            if lease_id:
                revoked, lease_id = lease_id, 0
                await store.revoke_lease(revoked)
            async with contextlib.aclosing(store.watch(key, after_revision=holder.mod_revision)) as changes:
                async for batch in changes:
                    if any(event.key == key for event in batch.events):
                        break
        except CompactedError:
            continue
        except LeaseGoneError:
            lease_id = 0
        except StoreError as failure:
            _LOG.warning("election_retried", key=key, reason=str(failure))
            await asyncio.sleep(_RETRY_SECONDS * (1 + random.random()))  # noqa: S311  Jitter, no secret.
        except asyncio.CancelledError:
            if lease_id:
                # The commit may have been done, and a claim without a holder would block the next leader.
                with contextlib.suppress(StoreError):
                    await store.revoke_lease(lease_id)
            raise


async def _renew(store: StateStore, leadership: Leadership, *, ttl_seconds: float) -> None:
    """Keeps the claim alive; sets `lost` before the store could give it to somebody else."""
    clock = leadership.clock
    while True:
        await asyncio.sleep(ttl_seconds / 4)
        asked_at = clock()
        try:
            async with asyncio.timeout(max(0.0, leadership.certain_until - asked_at)):
                await store.keep_alive(leadership.lease_id)
            # The lease may have ended during a pause and its renewal have been answered before; only the time tells.
            if asked_at < leadership.certain_until:
                leadership.certain_until = asked_at + ttl_seconds
            else:
                leadership.lost.set()
        except LeaseGoneError:
            leadership.lost.set()
        except (StoreError, TimeoutError) as failure:
            _LOG.warning("lease_not_renewed", key=leadership.key, reason=str(failure))
            if clock() >= leadership.certain_until:
                leadership.lost.set()
        if leadership.lost.is_set():
            _LOG.warning("leadership_lost", key=leadership.key, fence=leadership.fence)
            return
