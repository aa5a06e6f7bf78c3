"""The contract of a state store, held by every implementation."""

import asyncio
import contextlib
import itertools
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvist.etcd import EtcdOptions, EtcdStore
from kvist.store import (
    CompactedError,
    Compare,
    Delete,
    Event,
    EventType,
    LeaseGoneError,
    Put,
    StateStore,
    StoreError,
    StoreFullError,
    TooLargeError,
)
from kvist.store.interface import LARGEST_VALUE_BYTES, MOST_OPERATIONS
from kvist.store.sqlite import SqliteStore
from support.etcd_process import EtcdProcess, etcd_process

LIMIT_SECONDS = 10


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    with etcd_process(tmp_path_factory.mktemp("etcd")) as member:
        yield member


@pytest.fixture(params=["sqlite", "etcd"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], StateStore]:
    """Makes a store object of one and the same fresh store."""
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path / "state.sqlite")
    options = EtcdOptions((request.getfixturevalue("etcd").address,))
    namespace = f"/test-{uuid.uuid4()}"
    return lambda: EtcdStore(options, namespace=namespace)


@pytest.fixture
async def store(opener: Callable[[], StateStore]) -> AsyncIterator[StateStore]:
    async with asyncio.timeout(60), opener() as opened:
        yield opened


async def events_of(store: StateStore, prefix: str, *, after_revision: int, count: int) -> list[Event]:
    seen: list[Event] = []
    async with (
        asyncio.timeout(LIMIT_SECONDS),
        contextlib.aclosing(store.watch(prefix, after_revision=after_revision)) as batches,
    ):
        async for batch in batches:
            seen += batch.events
            if len(seen) >= count:
                return seen
    return seen


async def test_a_put_is_read_back_with_its_revisions(store: StateStore) -> None:
    first = await store.put("/a", b"1")
    second = await store.put("/a", b"2")
    found = await store.get("/a")
    assert found is not None
    assert (found.value, found.create_revision, found.mod_revision) == (b"2", first, second)
    assert second == first + 1
    assert await store.get("/b") is None


async def test_a_listing_is_ordered_and_of_one_prefix(store: StateStore) -> None:
    for key in ("/x/b", "/x/a", "/x/é", "/y/a", "/x"):
        revision = await store.put(key, key.encode())
    listing = await store.list("/x/")
    assert [item.key for item in listing.items] == ["/x/a", "/x/b", "/x/é"]
    assert listing.revision == revision
    assert len((await store.list("")).items) == 5


async def test_a_transaction_is_done_whole_or_not_at_all(store: StateStore) -> None:
    revision = await store.put("/a", b"1")
    refused = await store.commit([Put("/b", b"1"), Delete("/a")], when=[Compare("/a", mod_revision=revision + 1)])
    assert (refused.succeeded, refused.revision) == (False, revision)
    done = await store.commit(
        [Put("/b", b"1"), Delete("/a")],
        when=[Compare("/a", mod_revision=revision), Compare("/b", mod_revision=0)],
    )
    assert (done.succeeded, done.revision) == (True, revision + 1)
    assert [item.key for item in (await store.list("")).items] == ["/b"]


async def test_a_key_made_anew_has_another_creation(store: StateStore) -> None:
    first = await store.put("/a", b"1")
    await store.delete("/a")
    await store.put("/a", b"1")
    assert not (await store.commit([Put("/a", b"2")], when=[Compare("/a", create_revision=first)])).succeeded


async def test_deleting_nothing_makes_no_revision(store: StateStore) -> None:
    revision = await store.put("/a", b"1")
    assert revision == await store.delete("/none")


async def test_a_key_is_touched_once(store: StateStore) -> None:
    with pytest.raises(ValueError, match="once"):
        await store.commit([Put("/a", b"1"), Delete("/a")])


async def test_a_watch_resumes_where_it_is_told_to(store: StateStore) -> None:
    first = await store.put("/w/a", b"1")
    await store.put("/other", b"1")
    await store.commit([Put("/w/b", b"2"), Delete("/w/a")])
    assert [
        Event(EventType.DELETE, "/w/a", b"", first + 2),
        Event(EventType.PUT, "/w/b", b"2", first + 2),
    ] == await events_of(store, "/w/", after_revision=first, count=2)


async def test_a_watch_sees_what_happens_later(store: StateStore) -> None:
    revision = await store.put("/w/a", b"1")
    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(events_of(store, "/w/", after_revision=revision, count=1))
        await store.put("/w/b", b"2")
    assert [Event(EventType.PUT, "/w/b", b"2", revision + 1)] == watcher.result()


async def test_a_cut_history_is_said(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "s", kept_revisions=10) as store:
        for number in range(40):
            await store.put("/a", str(number).encode())
        with pytest.raises(CompactedError):
            await anext(store.watch("/", after_revision=1))
        assert [event.value for event in await events_of(store, "/", after_revision=39, count=1)] == [b"39"]


async def test_closing_ends_watches(opener: Callable[[], StateStore]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        async with opener() as store:
            revision = await store.put("/a", b"1")
            watcher = asyncio.ensure_future(anext(store.watch("/", after_revision=revision)))
            await store.get("/a")
        with pytest.raises(StoreError):
            await watcher


async def test_closing_ends_everything_that_waits_with_an_error(opener: Callable[[], StateStore]) -> None:
    """Watches at whatever point they are, and calls; none ends as if it had been cancelled."""
    async with asyncio.timeout(LIMIT_SECONDS):
        for pauses in range(12):
            store = opener()
            await store.__aenter__()
            waiting: list[asyncio.Future[object]] = [
                asyncio.ensure_future(anext(store.watch("/none", after_revision=0)))
            ]
            lease = await store.grant_lease(60)
            waiting += [asyncio.ensure_future(call) for call in (store.keep_alive(lease), store.get("/a"))]
            for _ in range(pauses):
                await asyncio.sleep(0)
            await store.__aexit__(None, None, None)
            done = await asyncio.gather(*waiting, return_exceptions=True)
            assert not any(isinstance(result, asyncio.CancelledError) for result in done), done
            with pytest.raises(StoreError):
                await store.get("/a")


async def test_a_lease_takes_its_keys_along(tmp_path: Path) -> None:
    now = [100.0]
    async with asyncio.timeout(LIMIT_SECONDS), SqliteStore(tmp_path / "s", clock=lambda: now[0]) as store:
        lease = await store.grant_lease(5)
        await store.put("/l/a", b"1", lease_id=lease)
        revision = await store.put("/l/b", b"1")
        now[0] += 4
        await store.keep_alive(lease)
        now[0] += 4
        assert await store.get("/l/a") is not None
        now[0] += 1
        # Nobody writes: the poll ends the lease.
        assert [Event(EventType.DELETE, "/l/a", b"", revision + 1)] == await events_of(
            store, "/l/", after_revision=revision, count=1
        )
        with pytest.raises(LeaseGoneError):
            await store.keep_alive(lease)
        with pytest.raises(LeaseGoneError):
            await store.put("/l/c", b"1", lease_id=lease)
        await store.revoke_lease(lease)


async def test_revoking_deletes_at_once_and_a_detached_key_stays(store: StateStore) -> None:
    lease = await store.grant_lease(60)
    await store.put("/a", b"1", lease_id=lease)
    await store.put("/b", b"1", lease_id=lease)
    await store.put("/b", b"2")
    await store.revoke_lease(lease)
    assert [item.key for item in (await store.list("")).items] == ["/b"]


async def test_a_restored_store_has_a_greater_epoch_for_good(opener: Callable[[], StateStore]) -> None:
    async with opener() as store:
        first = store.epoch
        assert first > 0
        assert await store.declare_restored() > first
        second = store.epoch
    async with opener() as store:
        assert second == store.epoch


async def test_a_second_opener_sees_commits_of_the_first(opener: Callable[[], StateStore]) -> None:
    async with opener() as one, opener() as two:
        assert one.epoch == two.epoch
        revision = (await two.list("")).revision
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(events_of(two, "/", after_revision=revision, count=2))
            await one.put("/a", b"1")
            await one.put("/b", b"1")
        assert [event.key for event in watcher.result()] == ["/a", "/b"]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["/p/a", "/p/b", "/q/a"]), st.sampled_from([b"1", b"2", None]), st.booleans()),
    max_size=30,
)


@pytest.mark.parametrize("kind", ["sqlite", "etcd"])
@given(operations=OPERATIONS, start=st.integers(0, 30))
@hypothesis_settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_history_replays_to_the_present(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, operations: list, start: int
) -> None:
    """Against a naive model: a dictionary, and a list of all changes."""
    name = str(uuid.uuid4())
    opened = (
        SqliteStore(tmp_path / name)
        if kind == "sqlite"
        else EtcdStore(EtcdOptions((request.getfixturevalue("etcd").address,)), namespace=f"/{name}")
    )

    async def run() -> None:
        async with opened as store:
            model: dict[str, bytes] = {}
            changes: list[tuple[int, str, bytes | None]] = []
            # Revisions of this test begin where those of the store are.
            base = revision = (await store.list("")).revision
            for key, value, is_guarded in operations:
                condition = [Compare(key, mod_revision=0)] if is_guarded else []
                outcome = await store.commit([Delete(key) if value is None else Put(key, value)], when=condition)
                assert outcome.succeeded == (not is_guarded or key not in model)
                if outcome.succeeded and (value is not None or key in model):
                    revision += 1
                    changes.append((revision, key, value))
                    if value is None:
                        del model[key]
                    else:
                        model[key] = value
                assert revision == outcome.revision
            listing = await store.list("/p/")
            assert {key: value for key, value in model.items() if key.startswith("/p/")} == {
                item.key: item.value for item in listing.items
            }
            expected = [change for change in changes if change[0] > base + start and change[1].startswith("/p/")]
            if expected:
                seen = await events_of(store, "/p/", after_revision=base + start, count=len(expected))
                assert expected == [
                    (event.revision, event.key, None if event.type is EventType.DELETE else event.value)
                    for event in seen
                ]

    asyncio.run(run())


async def test_several_processes_lose_no_update(opener: Callable[[], StateStore]) -> None:
    script = Path(__file__).parents[1] / "support" / "store_writer.py"
    async with opener() as store:
        place = (
            ["sqlite", str(store.path)]
            if isinstance(store, SqliteStore)
            else ["etcd", store.endpoints[0], store.namespace]
        )
        processes = [await asyncio.create_subprocess_exec(sys.executable, script, "40", *place) for _ in range(3)]
        try:
            async with asyncio.timeout(60):
                assert [await process.wait() for process in processes] == [0, 0, 0]
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
        found = await store.get("/counter")
        assert found is not None
        assert found.value == b"120"


async def test_a_lease_ends_in_time_and_takes_its_keys_along(store: StateStore) -> None:
    lease, kept = await store.grant_lease(2), await store.grant_lease(2)
    revision = await store.put("/l/a", b"1", lease_id=lease)
    await store.put("/l/b", b"1", lease_id=kept)
    ended: list[Event] = []
    async with asyncio.timeout(LIMIT_SECONDS), asyncio.TaskGroup() as group:

        async def keep() -> None:
            while not ended:
                await store.keep_alive(kept)
                await asyncio.sleep(0.3)

        group.create_task(keep())
        ended += (await events_of(store, "/l/", after_revision=revision, count=2))[1:]
    assert [(EventType.DELETE, "/l/a")] == [(event.type, event.key) for event in ended]
    assert await store.get("/l/b") is not None
    with pytest.raises(LeaseGoneError):
        await store.keep_alive(lease)
    with pytest.raises(LeaseGoneError):
        await store.put("/l/c", b"1", lease_id=lease)
    await store.revoke_lease(lease)


async def test_many_leases_are_renewed_side_by_side(store: StateStore) -> None:
    leases = [await store.grant_lease(5) for _ in range(20)]
    await store.revoke_lease(leases[7])
    async with asyncio.timeout(LIMIT_SECONDS):
        results = await asyncio.gather(
            *(store.keep_alive(lease) for lease in itertools.chain(leases, leases)), return_exceptions=True
        )
    assert [isinstance(result, LeaseGoneError) for result in results] == [number % 20 == 7 for number in range(40)]


async def test_what_is_too_large_is_refused_before_it_is_sent(store: StateStore) -> None:
    revision = await store.put("/largest", bytes(LARGEST_VALUE_BYTES))
    await store.commit([Put(f"/{number}", b"") for number in range(MOST_OPERATIONS)])
    with pytest.raises(TooLargeError):
        await store.put("/a", bytes(LARGEST_VALUE_BYTES + 1))
    with pytest.raises(TooLargeError):
        await store.commit([Put(f"/{number}", b"") for number in range(MOST_OPERATIONS + 1)])
    with pytest.raises(TooLargeError):
        await store.commit([Put(f"/{number}", bytes(LARGEST_VALUE_BYTES // 2)) for number in range(3)])
    assert (await store.list("")).revision == revision + 1


async def test_a_full_disk_takes_nothing_and_loses_nothing(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "s") as store:
        await store.put("/kept", b"1")
        connection = store._db
        connection.execute("PRAGMA max_page_count = 40")
        with pytest.raises(StoreFullError):
            for number in range(40):
                await store.put(f"/{number}", bytes(10_000))
        revision = (await store.list("/")).revision
        with pytest.raises(StoreFullError):
            await store.put("/late", bytes(200_000))
        listing = await store.list("/")
        assert listing.revision == revision
        assert "/late" not in {item.key for item in listing.items}
        connection.execute("PRAGMA max_page_count = 10000")
        assert await store.put("/late", b"1") == revision + 1


async def test_a_long_listing_is_whole_and_of_one_revision(store: StateStore) -> None:
    names = [f"/n/{number:04}" for number in range(1_234)]
    for start in range(0, len(names), MOST_OPERATIONS):
        revision = (await store.commit([Put(name, b"x") for name in names[start : start + MOST_OPERATIONS]])).revision
    listing = await store.list("/n/")
    assert names == [item.key for item in listing.items]
    assert revision == listing.revision
