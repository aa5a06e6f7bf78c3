"""Elections: one leader at a time, fences that grow, and a deposed leader that cannot write."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from kvist import errors
from kvist.store import Put
from kvist.store.election import lead
from kvist.store.sqlite import SqliteStore

KEY = "/elections/test"


async def test_leaders_follow_each_other_with_growing_fences(tmp_path: Path) -> None:
    fences: list[int] = []
    holding = 0

    async def candidate(name: str) -> None:
        nonlocal holding
        async with SqliteStore(tmp_path / "s") as store, lead(store, KEY, identity=name, ttl_seconds=5) as leadership:
            holding += 1
            assert holding == 1
            await leadership.commit(store, [Put(f"/by/{name}", b"")])
            fences.append(leadership.fence)
            holding -= 1

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(candidate(str(number)))
    assert len(fences) == 4
    assert sorted(fences) == fences


async def test_a_deposed_leader_cannot_write(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(20),
        SqliteStore(tmp_path / "s") as store,
        lead(store, KEY, identity="old", ttl_seconds=60) as old,
    ):
        # As if the old leader had been frozen for longer than its lease.
        claim = await store.get(KEY)
        assert claim is not None
        async with SqliteStore(tmp_path / "s") as other:
            await other.revoke_lease(claim.lease_id)
            async with lead(other, KEY, identity="new", ttl_seconds=60) as new:
                assert new.fence > old.fence
                with pytest.raises(errors.PreconditionError) as caught:
                    await old.commit(store, [Put("/x", b"old")])
                assert caught.value.code == "STALE_FENCE"
                assert old.lost.is_set()
                assert (await new.commit(other, [Put("/x", b"new")])).succeeded
        found = await store.get("/x")
        assert found is not None
        assert found.value == b"new"


async def test_a_leader_whose_lease_ended_is_told(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(20),
        SqliteStore(tmp_path / "s") as store,
        lead(store, KEY, identity="one", ttl_seconds=0.4) as leadership,
    ):
        claim = await store.get(KEY)
        assert claim is not None
        await store.revoke_lease(claim.lease_id)
        await leadership.lost.wait()


async def test_a_cancelled_candidate_leaves_no_claim(tmp_path: Path) -> None:
    async def wait() -> None:
        async with lead(store, KEY, identity="waiting", ttl_seconds=60):
            raise AssertionError("two leaders")

    async with asyncio.timeout(20), SqliteStore(tmp_path / "s") as store:
        async with lead(store, KEY, identity="one", ttl_seconds=60):
            waiting = asyncio.create_task(wait())
            await store.get("/a")
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
        assert await store.get(KEY) is None


async def test_a_fence_also_grows_when_the_store_is_restored_or_replaced(tmp_path: Path) -> None:
    """Agents keep the highest fence they have seen, and a restored store counts revisions from an older one on."""
    async with asyncio.timeout(20):
        async with SqliteStore(tmp_path / "old") as store:
            for number in range(50):
                await store.put("/many", str(number).encode())
            async with lead(store, KEY, identity="one", ttl_seconds=5) as first:
                assert first.create_revision > 50
        async with SqliteStore(tmp_path / "new") as store, lead(store, KEY, identity="one", ttl_seconds=5) as second:
            assert second.create_revision == 1
            assert second.fence > first.fence
        async with SqliteStore(tmp_path / "new") as store:
            await store.declare_restored()
            async with lead(store, KEY, identity="one", ttl_seconds=5) as third:
                assert third.fence > second.fence


async def test_a_leader_that_was_paused_past_its_lease_knows_before_it_acts(tmp_path: Path) -> None:
    now = [100.0]
    async with (
        asyncio.timeout(20),
        SqliteStore(tmp_path / "s") as store,
        lead(store, KEY, identity="one", ttl_seconds=60, clock=lambda: now[0]) as leadership,
    ):
        assert leadership.is_certain
        now[0] += 59
        assert leadership.is_certain
        now[0] += 1
        # Nothing has run since: no renewal, no answer of the store.
        assert not leadership.is_certain
