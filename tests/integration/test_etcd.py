"""The state store on real etcd: what SQLite does not have, and three members of which one is ill."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
from structlog.testing import capture_logs

from kvist import errors
from kvist.etcd import EtcdOptions, EtcdStore
from kvist.etcd.api import auth_pb2, rpc_pb2
from kvist.etcd.api.rpc_pb2_grpc import AuthStub, KVStub
from kvist.etcd.endpoints import EtcdEndpoints
from kvist.etcd.watch import SILENCE_SECONDS
from kvist.store import (
    AccessError,
    CompactedError,
    Compare,
    Put,
    StateStore,
    StoreError,
    StoreFullError,
    StoreRestoredError,
    UnknownOutcomeError,
)
from kvist.store.election import lead
from kvist.store.mirror import Mirror
from kvist.tls_files import TlsFiles
from support.etcd_process import EtcdCluster, EtcdProcess, etcd_process
from support.mesh import until
from support.nats_security import make_certificate
from support.tcp_proxy import TcpProxy

T = TypeVar("T")

pytestmark = [pytest.mark.integration]
SECONDS = 60
# A member that is ill costs one attempt, and the others elect a new leader meanwhile.
MOST_SECONDS_WITHOUT_ONE_MEMBER = 8.0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    with etcd_process(tmp_path_factory.mktemp("etcd")) as member:
        yield member


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[EtcdCluster]:
    async with EtcdCluster(tmp_path).running() as running:
        yield running


def store_of(*endpoints: str, time_limit_seconds: float = 5.0, **options: object) -> EtcdStore:
    return EtcdStore(EtcdOptions(endpoints, time_limit_seconds=time_limit_seconds, **options), namespace="/test")


async def compact(address: str, revision: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        await KVStub(channel).Compact(rpc_pb2.CompactionRequest(revision=revision, physical=True))


async def test_a_mirror_whose_history_was_cut_learns_of_deletions(etcd: EtcdProcess) -> None:
    """It was away while keys went and history with them."""
    namespace = f"/{uuid.uuid4()}"
    seen: list[tuple[str, str]] = []
    async with asyncio.timeout(SECONDS), EtcdStore(EtcdOptions((etcd.address,)), namespace=namespace) as store:
        await store.put("/a", b"1")
        await store.put("/b", b"1")
        mirror = Mirror(store, "/", on_change=lambda events: seen.extend((e.type.value, e.key) for e in events))
        task = asyncio.create_task(mirror.run())
        await until("the mirror has both", lambda: len(mirror.contents) == 2)
        task.cancel()
        first = mirror.revision
        await store.delete("/a")
        revision = await store.put("/b", b"2")
        await compact(etcd.address, revision)
        with pytest.raises(CompactedError):
            await anext(store.watch("/", after_revision=first))
        del seen[:]
        task = asyncio.create_task(mirror.run())
        await until("the mirror is current", lambda: mirror.revision >= revision)
        task.cancel()
    assert [("delete", "/a"), ("put", "/b")] == seen
    assert {"/b": b"2"} == {key: item.value for key, item in mirror.contents.items()}


async def test_a_quiet_store_is_not_taken_for_a_dead_member(etcd: EtcdProcess) -> None:
    """Nothing changes for longer than a member is believed in silence."""
    async with asyncio.timeout(SECONDS), store_of(etcd.address) as store:
        revision = (await store.list("")).revision
        watching = asyncio.ensure_future(anext(store.watch("/quiet", after_revision=revision)))
        with capture_logs() as logs:
            await asyncio.sleep(2 * SILENCE_SECONDS + 1.5)
        assert "etcd_member_left" not in {line["event"] for line in logs}
        written = await store.put("/quiet", b"1")
        batch = await watching
        assert [written] == [event.revision for event in batch.events]


async def test_changes_larger_than_a_message_come_whole(tmp_path: Path) -> None:
    """A revision of many keys is sent in fragments and put together again."""
    with etcd_process(tmp_path, arguments=("--max-request-bytes", "1600000")) as member:
        async with asyncio.timeout(SECONDS), store_of(member.address) as store:
            first = (await store.list("")).revision
            for _ in range(4):
                await store.commit([Put(f"/{number}", bytes(12_000)) for number in range(100)])
            seen: dict[int, int] = {}
            async for batch in store.watch("/", after_revision=first):
                revisions = {event.revision for event in batch.events}
                for revision in revisions:
                    assert revision not in seen, "a revision was torn apart"
                    seen[revision] = sum(event.revision == revision for event in batch.events)
                if len(seen) == 4:
                    break
    assert [100] * 4 == list(seen.values())


async def test_a_full_etcd_says_so_and_can_still_be_read(tmp_path: Path) -> None:
    with etcd_process(tmp_path, arguments=("--quota-backend-bytes", str(2 * 1024 * 1024))) as member:
        async with asyncio.timeout(SECONDS), store_of(member.address) as store:
            await store.put("/first", b"1")
            with pytest.raises(StoreFullError, match="NOSPACE"):
                # The size that counts is that of the last flush, so a quick machine writes well beyond the quota.
                for number in itertools.count():
                    await store.put(f"/{number}", bytes(500_000))
            small = 0
            with pytest.raises(StoreFullError):
                # On a busy machine the alarm comes into force a moment after the first refusal.
                while True:
                    small += 1
                    await store.put(f"/small-{small}", b"1")
            found = await store.get("/first")
            assert found is not None
            assert await store.get(f"/small-{small}") is None


async def test_a_token_that_has_expired_is_renewed_unseen(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret\n")
    # Tokens live for two seconds.
    with etcd_process(tmp_path, arguments=("--auth-token-ttl", "2")) as member:
        async with asyncio.timeout(SECONDS):
            async with grpc.aio.insecure_channel(member.address) as channel:
                await _enable_users(AuthStub(channel))
            options = EtcdOptions((member.address,), username="kvist", password_file=password)
            async with EtcdStore(options, namespace="/test") as store:
                lease = await store.grant_lease(30)
                revision = await store.put("/a", b"1", lease_id=lease)
                watching = store.watch("/", after_revision=revision - 1)
                assert (await anext(watching)).events
                for _ in range(3):
                    # Longer than a token lives, and longer than a stream is believed in silence.
                    await asyncio.sleep(2.5)
                    await store.keep_alive(lease)
                    written = await store.put("/a", b"2")
                    async for batch in watching:
                        if any(event.revision == written for event in batch.events):
                            break
                with pytest.raises(AccessError):
                    async with EtcdStore(options, namespace="/elsewhere"):
                        pass
                await watching.aclose()
            password.write_text("wrong")
            with pytest.raises(AccessError):
                async with EtcdStore(options, namespace="/test"):
                    pass


async def _enable_users(auth: AuthStub) -> None:
    await auth.RoleAdd(rpc_pb2.AuthRoleAddRequest(name="root"))
    await auth.RoleAdd(rpc_pb2.AuthRoleAddRequest(name="kvist"))
    permission = auth_pb2.Permission(permType=auth_pb2.Permission.READWRITE, key=b"/test/", range_end=b"/test0")
    await auth.RoleGrantPermission(rpc_pb2.AuthRoleGrantPermissionRequest(name="kvist", perm=permission))
    for user in ("root", "kvist"):
        await auth.UserAdd(rpc_pb2.AuthUserAddRequest(name=user, password="secret"))  # noqa: S106  Of this test alone.
        await auth.UserGrantRole(rpc_pb2.AuthUserGrantRoleRequest(user=user, role=user))
    await auth.AuthEnable(rpc_pb2.AuthEnableRequest())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by the openssl command")
async def test_only_who_has_a_certificate_comes_in(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    arguments = (
        *("--cert-file", str(certificate.file), "--key-file", str(certificate.key_file)),
        *("--trusted-ca-file", str(certificate.ca_file), "--client-cert-auth"),
    )
    with etcd_process(tmp_path, arguments=arguments, scheme="https") as member:
        async with asyncio.timeout(SECONDS):
            whole = TlsFiles(certificate.ca_file, certificate.file, certificate.key_file)
            async with store_of(member.address, tls=whole) as store:
                await store.put("/a", b"1")
                # A certificate that is replaced on disk is used without a new start.
                for file in (certificate.file, certificate.key_file):
                    renewed = file.with_suffix(".new")
                    renewed.write_bytes(file.read_bytes())
                    renewed.rename(file)
                await store.put("/a", b"2")
            for tls in (TlsFiles(certificate.ca_file), None):
                with pytest.raises(StoreError):
                    async with store_of(member.address, tls=tls, time_limit_seconds=1.0):
                        pass


async def test_a_store_that_went_back_begins_a_new_epoch(tmp_path: Path) -> None:
    """A backup was put in the place of etcd's data while everybody went on running."""
    member = EtcdProcess(tmp_path)
    member.start()
    try:
        async with asyncio.timeout(SECONDS):
            await member.until_listening()
            async with store_of(member.address) as store, store_of(member.address) as other:
                first_epoch = store.epoch
                assert first_epoch == other.epoch
                await store.put("/kept", b"1")
                member.kill()
                shutil.copytree(tmp_path / "solo", tmp_path / "backup")
                member.start()
                await member.until_listening()
                for number in range(5):
                    await store.put("/lost", str(number).encode())
                await other.get("/lost")
                mirror = Mirror(store, "/", on_change=lambda _events: None)
                following = asyncio.create_task(mirror.run())
                await until("the mirror has both", lambda: len(mirror.contents) == 2)
                member.kill()
                shutil.rmtree(tmp_path / "solo")
                shutil.move(tmp_path / "backup", tmp_path / "solo")
                member.start()
                await member.until_listening()
                await until("the mirror forgets what is gone", lambda: set(mirror.contents) == {"/kept"})
                following.cancel()
                assert store.epoch > first_epoch
                assert await store.get("/lost") is None
                # All agree on one epoch, whoever noticed first.
                with contextlib.suppress(StoreRestoredError):
                    await other.list("/")
                await other.list("/")
                assert store.epoch == other.epoch
    finally:
        member.kill()


async def test_a_write_without_an_answer_is_unknown_and_not_repeated(etcd: EtcdProcess) -> None:
    """It was done all the same: only the answer was lost."""
    async with (
        asyncio.timeout(SECONDS),
        TcpProxy(etcd.client_port) as proxy,
        store_of(f"127.0.0.1:{proxy.port}", time_limit_seconds=1.0) as store,
    ):
        await store.put("/unknown", b"1")
        proxy.loses_answers = True
        with pytest.raises(UnknownOutcomeError):
            await store.put("/unknown", b"2")
        await proxy.heal()
        found = await _until_answered(lambda: store.get("/unknown"))
        assert found is not None
        assert (b"2", found.create_revision + 1) == (found.value, found.mod_revision)


Illness = Callable[[EtcdCluster, str], None]


def kill(cluster: EtcdCluster, name: str) -> None:
    cluster.members[name].kill()


def freeze(cluster: EtcdCluster, name: str) -> None:
    cluster.members[name].freeze()


def isolate(cluster: EtcdCluster, name: str) -> None:
    cluster.isolate(name)


async def recover(cluster: EtcdCluster, name: str, illness: Illness) -> None:
    if illness is kill:
        cluster.members[name].start()
    elif illness is freeze:
        cluster.members[name].thaw()
    else:
        await cluster.heal()


@pytest.mark.parametrize("illness", [kill, freeze, isolate], ids=lambda illness: illness.__name__)
@pytest.mark.timeout(180)
async def test_one_ill_member_of_three_costs_seconds_and_loses_nothing(cluster: EtcdCluster, illness: Illness) -> None:
    """Its leader is ill, and it is the member that the store talks to.

    A counter is raised by compare-and-swap all the while, a lease is kept, a watch runs, a leader leads. Each write
    whose outcome is known is in the history once; the watch gives the history without a gap.
    """
    async with asyncio.timeout(150):
        ill = await cluster.leader()
        ordered = sorted(cluster.members)
        first = ordered.index(ill)
        endpoints = cluster.endpoints[first:] + cluster.endpoints[:first]
        async with store_of(*endpoints) as store, store_of(*endpoints) as watcher:
            history: list[int] = []
            start = await store.put("/counter", b"0")
            watching = asyncio.create_task(_note_counter(watcher, start, history))
            acknowledged: list[int] = []
            pauses: list[float] = []
            is_over = asyncio.Event()
            counting = asyncio.create_task(_count(store, acknowledged, pauses, is_over))
            lease = await store.grant_lease(20)
            await store.put("/leased", b"1", lease_id=lease)
            async with lead(store, "/election", identity="one", ttl_seconds=10) as leadership:
                await until("counting goes on", lambda: len(acknowledged) >= 20)
                illness(cluster, ill)
                before = len(acknowledged)
                await until("counting goes on without it", lambda: len(acknowledged) >= before + 20)
                await store.keep_alive(lease)
                assert not leadership.lost.is_set()
                assert leadership.is_certain
                await leadership.commit(store, [Put("/led", b"1")])
                await recover(cluster, ill, illness)
                before = len(acknowledged)
                await until("counting goes on with it", lambda: len(acknowledged) >= before + 20)
                assert await store.get("/leased") is not None
            is_over.set()
            await counting
            last = await store.get("/counter")
            assert last is not None
            await until("the watch is at the end", lambda: history and history[-1] == int(last.value))
            watching.cancel()
    assert list(range(1, int(last.value) + 1)) == history
    assert set(acknowledged) <= set(history)
    assert len(set(acknowledged)) == len(acknowledged)
    assert max(pauses) < MOST_SECONDS_WITHOUT_ONE_MEMBER, pauses


@pytest.mark.timeout(180)
async def test_a_write_does_not_move_on_to_the_frozen_member(cluster: EtcdCluster) -> None:
    """The leader freezes behind another member: the write at hand is lost, the next one is not."""
    async with asyncio.timeout(150):
        frozen = await cluster.leader()
        others = [name for name in sorted(cluster.members) if name != frozen]
        addresses = dict(zip(sorted(cluster.members), cluster.endpoints, strict=True))
        order = [addresses[name] for name in (others[0], frozen, others[1])]
        async with EtcdEndpoints(EtcdOptions(tuple(order), time_limit_seconds=4.0)) as endpoints:

            async def put(value: bytes) -> None:
                request = rpc_pb2.PutRequest(key=b"/x", value=value)
                await endpoints.call(lambda channel: KVStub(channel).Put, request, is_repeatable=False)

            for address in order:
                # So that connections to all of them stand.
                await put(b"0")
                endpoints.leave(address, "in a test")
            cluster.members[frozen].freeze()
            with pytest.raises(UnknownOutcomeError):
                await put(b"1")
            await put(b"2")
        cluster.members[frozen].thaw()


async def _count(store: StateStore, acknowledged: list[int], pauses: list[float], is_over: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    last_at = loop.time()
    while not is_over.is_set():
        try:
            found = await store.get("/counter")
            assert found is not None
            value = int(found.value) + 1
            condition = Compare("/counter", mod_revision=found.mod_revision)
            outcome = await store.commit([Put("/counter", str(value).encode())], when=[condition])
        except StoreError:
            continue
        # One may fail that was taken for unknown and done: the next reading knows.
        if outcome.succeeded:
            acknowledged.append(value)
            pauses.append(loop.time() - last_at)
            last_at = loop.time()


async def _note_counter(store: StateStore, after_revision: int, history: list[int]) -> None:
    position = after_revision
    while True:
        with contextlib.suppress(StoreError):
            async for batch in store.watch("/counter", after_revision=position):
                position = batch.revision
                history += [int(event.value) for event in batch.events if event.key == "/counter"]


async def test_a_leader_cut_off_from_the_store_gives_up_before_another_is_elected(cluster: EtcdCluster) -> None:
    async with asyncio.timeout(90), store_of(*cluster.endpoints) as other:
        alone = store_of(cluster.endpoints[0], time_limit_seconds=1.0)
        async with alone, lead(alone, "/election", identity="old", ttl_seconds=3) as old:
            cluster.isolate(min(cluster.members))
            async with lead(other, "/election", identity="new", ttl_seconds=3) as new:
                assert old.lost.is_set()
                assert not old.is_certain
                assert new.fence > old.fence
                await cluster.heal()
                with pytest.raises(errors.PreconditionError) as caught:
                    await _until_answered(lambda: old.commit(alone, [Put("/x", b"old")]))
                assert caught.value.code == "STALE_FENCE"
                assert await other.get("/x") is None


async def _until_answered(call: Callable[[], Awaitable[T]]) -> T:
    """Calls again while the store cannot be reached."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(StoreError):
                return await call()


def test_the_stubs_of_etcd_are_those_of_the_server_that_is_tested() -> None:
    page = (Path(__file__).parents[2] / "proto/third_party/etcd/README.md").read_text()
    module = (Path(__file__).parents[1] / "support/etcd/go.mod").read_text()
    version = module.split("go.etcd.io/etcd/api/v3 ")[1].split()[0]
    assert f"| version | {version} of" in page
