"""Links to etcd, and between its members, are slow, and members are cut off from each other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import grpc

from kvist.etcd import EtcdOptions, EtcdStore
from kvist.etcd.api.rpc_pb2 import PutRequest
from kvist.etcd.api.rpc_pb2_grpc import KVStub
from kvist.grpc import open_channel
from support.control_mesh import CONTROLLER_KEY, KVMASTER_KEY, ROOT_KEY, ControlMesh
from support.failover import LIMIT_SECONDS, Scene
from support.faults.controllers import check_that_late_writes_fail, until_it_stands_by, until_served
from support.toxiproxy import Link

# Each way, so that a round trip takes 300 ± 100 ms longer: another continent.
DELAY_MILLISECONDS = 150
JITTER_MILLISECONDS = 50
KILOBYTES_PER_SECOND = 64
LATE_KEY = f"{ROOT_KEY}test/late-at-old-leader"
LATE_WRITE_SECONDS = 5.0


async def way_to_etcd_is_slow(scene: Scene) -> None:
    """Controllers are far from etcd."""
    links = [link for links in scene.mesh.etcd_links.values() for link in links.values()]
    await _change_over_slow_links(scene, links, "slow links between controllers and etcd", limit_seconds=5)


async def etcd_members_are_far_apart(scene: Scene) -> None:
    """Each write waits for another member. The lead of etcd itself may change: its time limits are those of a LAN."""
    links = list(scene.mesh.etcd.peer_links.values())
    await _change_over_slow_links(scene, links, "slow links between etcd members", limit_seconds=8)


async def _change_over_slow_links(scene: Scene, links: Sequence[Link], what: str, *, limit_seconds: float) -> None:
    mesh, load = scene.mesh, scene.load
    before, claims = len(load.outcomes), mesh.claims_of(CONTROLLER_KEY)
    async with _slow(links):
        async with scene.step(f"{what}: a change arrives", limit_seconds=limit_seconds) as step:
            step.begin()
            await scene.change()
            await asyncio.gather(*(until_served(edge, mesh.alias) for edge in mesh.edges()))
            step.end()
        if scene.form.is_full:
            # Longer than a lease lives that is not renewed. That of the short form is too short to be sure of on a
            # machine that others use.
            await asyncio.sleep(scene.form.controller_lease_seconds + 1)
            assert claims == mesh.claims_of(CONTROLLER_KEY), "the lead changed hands"
    assert [] == load.bad(since=before)
    await _until_both_are_led(scene)


@contextlib.asynccontextmanager
async def _slow(links: Sequence[Link]) -> AsyncIterator[None]:
    for link in links:
        await link.delay(milliseconds=DELAY_MILLISECONDS, jitter_milliseconds=JITTER_MILLISECONDS)
        await link.narrow(kilobytes_per_second=KILOBYTES_PER_SECOND)
    try:
        yield
    finally:
        for link in links:
            await link.heal()


async def etcd_leader_is_cut_off_from_the_others(scene: Scene) -> None:
    """Clients still reach it, and it takes their writes for as long as it believes to lead; none of them counts."""
    mesh, load = scene.mesh, scene.load
    before = len(load.outcomes)
    old = await mesh.etcd.leader()
    name = "etcd leader cut off from the other members, not from clients: a change is taken"
    # What is being written there is lost, and its client waits for its time limit of 5 s.
    async with scene.step(name, limit_seconds=8) as step:
        mesh.etcd.isolate_from_members(old)
        step.begin()
        late_write = asyncio.create_task(_write_late(mesh.etcd.members[old].address))
        await scene.change()
        step.end()
    assert await mesh.etcd.leader() != old
    assert not await late_write, "a leader without the others took a write"
    await mesh.etcd.heal()
    async with EtcdStore(EtcdOptions(mesh.etcd.endpoints)) as store:
        assert await store.get(LATE_KEY) is None
    assert [] == load.bad(since=before)
    await _until_both_are_led(scene)


async def _write_late(address: str) -> bool:
    """Whether a member says that it has taken a write."""
    async with open_channel(address, retries=False) as channel:
        request = PutRequest(key=LATE_KEY.encode(), value=b"late")
        try:
            await KVStub(channel).Put(request, timeout=LATE_WRITE_SECONDS)
        except grpc.aio.AioRpcError:
            return False
    return True


async def leading_controller_reaches_only_a_cut_off_member(scene: Scene) -> None:
    """It has a member to talk to, and that one nobody: the lead goes to the controller on the other side."""
    etcd = scene.mesh.etcd
    leader = await etcd.leader()
    minority = next(member for member in etcd.members if member != leader)
    links = scene.mesh.etcd_links[scene.mesh.holder(CONTROLLER_KEY)]
    others = [link for member, link in links.items() if member != minority]

    async def cut_off() -> None:
        etcd.isolate_from_members(minority)
        await asyncio.gather(*(link.black_hole() for link in others))

    async def heal() -> None:
        await asyncio.gather(*(link.heal() for link in others), etcd.heal())

    await _leading_controller_gives_up(scene, "reaches a cut-off member only", cut_off, heal)


async def leading_controller_is_refused_by_etcd(scene: Scene) -> None:
    """Its connections to all members end, and no new one is made."""
    links = scene.mesh.etcd_links[scene.mesh.holder(CONTROLLER_KEY)].values()

    async def cut_off() -> None:
        await asyncio.gather(*(link.cut() for link in links))

    async def heal() -> None:
        await asyncio.gather(*(link.heal() for link in links))

    await _leading_controller_gives_up(scene, "is refused by etcd", cut_off, heal)


async def _leading_controller_gives_up(
    scene: Scene, what: str, cut_off: Callable[[], Awaitable[None]], heal: Callable[[], Awaitable[None]]
) -> None:
    mesh, load = scene.mesh, scene.load
    before = len(load.outcomes)
    old = mesh.holder(CONTROLLER_KEY)
    claimed_at = mesh.claims_of(CONTROLLER_KEY)[-1][0]
    lost_terms = _lost_terms(mesh, old)
    limit = scene.form.controller_lease_seconds + 2
    async with scene.step(f"controller leader {what}: another one leads", limit_seconds=limit) as step:
        await cut_off()
        step.begin()
        await mesh.until_led(CONTROLLER_KEY, by_other_than=old, limit_seconds=LIMIT_SECONDS)
        step.end()
    new = mesh.holder(CONTROLLER_KEY)
    # By its own clock: no store has told it.
    await scene.until_true("the old leader has given up the lead", lambda: _lost_terms(mesh, old) > lost_terms)
    await scene.change()
    await heal()
    await until_it_stands_by(mesh, old)
    assert new == mesh.holder(CONTROLLER_KEY), "the old leader took the lead back"
    await check_that_late_writes_fail(mesh, claimed_at)
    assert [] == load.bad(since=before)


def _lost_terms(mesh: ControlMesh, name: str) -> int:
    """How often a controller has found out that it does not lead any more."""
    return (mesh.folder / f"{name}.log").read_text().count("leadership_lost")


async def _until_both_are_led(scene: Scene) -> None:
    mesh = scene.mesh
    await scene.until_true("both have a leader", lambda: mesh.holder(CONTROLLER_KEY) and mesh.holder(KVMASTER_KEY))
