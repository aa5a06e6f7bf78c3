"""The whole history of ledgers, as their workers tell it: the oracle for what indexes say.

A history knows, for each number of applied batches, count and digest of what was held, and whether a block was. It
computes digests by itself and compares them with those that the ledger states, so that it is no copy of either side.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from kvist.controller.v1.controller_pb2 import ClusterState
from kvist.engine.v1 import engine_pb2
from kvist.engine.v1.engine_pb2_grpc import EngineServiceStub
from kvist.events.v1.events_pb2 import KvEventBatch, LedgerDigest, TierDigest
from kvist.grpc import open_channel

Key = tuple[str, int, int]
"""Worker UID, rank, incarnation."""

_64 = (1 << 64) - 1
_128 = (1 << 128) - 1
# Bytes 16 to 31 of XXH3's secret.
_SECRET = (0xDB979083E96DD4DE ^ 0x1F67B3B7A4A44072) & _64


def fingerprint(block_hash: int) -> int:
    """XXH3-128 of the eight bytes of a hash, least significant first, with seed 0."""
    keyed = block_hash ^ _SECRET
    product = keyed * (0x9E3779B185EBCA87 + (8 << 2) & _64)
    low, high = product & _64, product >> 64
    high = (high + (low << 1)) & _64
    low ^= high >> 3
    low ^= low >> 35
    low = low * 0x9FB21C651E98DF25 & _64
    low ^= low >> 28
    high ^= high >> 37
    high = high * 0x165667919E3779F9 & _64
    high ^= high >> 32
    return high << 64 | low


@dataclass(slots=True)
class TierHistory:
    """One tier of one ledger.

    Attributes:
        accounts: Count and digest after each number of batches.
        held: What is held now.
        flips: For each block, after how many batches it came or went, in turn.
    """

    accounts: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    held: set[int] = field(default_factory=set)
    flips: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def flip(self, block: int, batches: int, digest: int) -> int:
        """Takes a block in or out; returns the digest after it."""
        self.flips[block].append(batches)
        if block in self.held:
            self.held.remove(block)
            return (digest - fingerprint(block)) & _128
        self.held.add(block)
        return (digest + fingerprint(block)) & _128


@dataclass(slots=True)
class LedgerHistory:
    """One (worker, rank, incarnation), from its beginning."""

    batches: int = 0
    tiers: dict[int, TierHistory] = field(default_factory=dict)
    removals: int = 0
    digests_compared: int = 0

    def apply(self, batch: KvEventBatch) -> None:
        """The next batch."""
        assert self.batches == batch.sequence, "the ledger's own stream has a hole"
        self.batches += 1
        digests = {number: tier.accounts[-1][1] for number, tier in self.tiers.items()}
        for event in batch.events:
            for number, block in self._flips(event):
                tier = self._tier(number)
                digests[number] = tier.flip(block, self.batches, digests.get(number, 0))
        for number, tier in self.tiers.items():
            tier.accounts.append((len(tier.held), digests.get(number, 0)))

    def _flips(self, event: object) -> list[tuple[int, int]]:
        match event.WhichOneof("event"):
            case "stored":
                held = self._tier(event.stored.tier).held
                new = dict.fromkeys(event.stored.block_hashes)
                return [(event.stored.tier, block) for block in new if block not in held]
            case "removed":
                held = self._tier(event.removed.tier).held
                gone = [block for block in dict.fromkeys(event.removed.block_hashes) if block in held]
                self.removals += len(gone)
                return [(event.removed.tier, block) for block in gone]
            case "cleared":
                numbers = [event.cleared.tier] if event.cleared.tier else list(self.tiers)
                return [(number, block) for number in numbers for block in self._tier(number).held]
        raise AssertionError(f"an event of no kind: {event}")

    def _tier(self, number: int) -> TierHistory:
        if number not in self.tiers:
            self.tiers[number] = TierHistory(accounts=[(0, 0)] * self.batches or [(0, 0)])
        return self.tiers[number]

    def account(self, batches: int) -> dict[int, tuple[int, int]]:
        """Count and digest by tier after so many batches; tiers that held nothing are left out."""
        accounts = {number: tier.accounts[batches] for number, tier in self.tiers.items()}
        return {number: account for number, account in accounts.items() if account[0]}

    def holds(self, tier: int, block: int, batches: int) -> bool:
        """Whether a block was held after so many batches."""
        flips = self.tiers[tier].flips.get(block, []) if tier in self.tiers else []
        return bisect.bisect_right(flips, batches) % 2 == 1

    def check_own_digest(self, digest: LedgerDigest) -> None:
        """The ledger's word about itself."""
        assert account_of(digest.tiers) == self.account(digest.next_sequence)
        self.digests_compared += 1


def account_of(tiers: Sequence[TierDigest]) -> dict[int, tuple[int, int]]:
    """Count and digest by tier as a ledger or an index states them."""
    return {tier.tier: (tier.block_count, int.from_bytes(tier.digest)) for tier in tiers if tier.block_count}


class Histories:
    """Follows every incarnation that a cluster state names, straight from its worker."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.by_key: dict[Key, LedgerHistory] = {}
        self._tasks = tasks
        self._following: dict[Key, asyncio.Task[None]] = {}

    def follow(self, state: ClusterState) -> None:
        """Takes up what is new."""
        for worker in state.workers:
            for rank in range(max(1, worker.ranks)):
                key = (worker.target.worker_uid, rank, worker.incarnation)
                if key not in self._following:
                    history = self.by_key[key] = LedgerHistory()
                    task = _follow(key, worker.target.address, history)
                    self._following[key] = self._tasks.create_task(task)

    def over(self, worker_uid: str, incarnation: int) -> None:
        """States that an incarnation is dead: its history is as long as it will ever be."""
        for key, task in self._following.items():
            if (key[0], key[2]) == (worker_uid, incarnation):
                task.cancel()

    def stop(self) -> None:
        """Follows nobody any more."""
        for task in self._following.values():
            task.cancel()


async def _follow(key: Key, address: str, history: LedgerHistory) -> None:
    """Reads one history for ever, from where it stopped after each break."""
    _, rank, incarnation = key
    while True:
        position = engine_pb2.ResumePosition(rank=rank, incarnation=incarnation)
        if history.batches:
            position.sequence = history.batches - 1
        request = engine_pb2.WatchKvEventsRequest(resume_after=[position], follow=True, ranks=[rank])
        try:
            async with open_channel(address, retries=False) as channel:
                async for response in EngineServiceStub(channel).WatchKvEvents(request):
                    match response.WhichOneof("part"):
                        case "batch":
                            assert response.batch.source.incarnation == incarnation
                            history.apply(response.batch)
                        case "digest":
                            history.check_own_digest(response.digest)
                        case "snapshot":
                            raise AssertionError(f"the ring of {key} does not reach back to {history.batches}")
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.1)
