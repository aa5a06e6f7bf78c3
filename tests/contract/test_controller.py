"""The controller over gRPC: resources, registration, cluster state, restart."""

import asyncio
import functools
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from kvist.agent.v1.agent_pb2 import WORKER_PHASE_BACKING_OFF, WORKER_PHASE_REFUSED, AttachedEngine, NodeInventory
from kvist.controller.v1 import controller_pb2 as pb
from kvist.errors import KvistError, rpc_errors
from kvist.store import StoreError
from kvist_controller.agent_session import AgentSession
from kvist_controller.follower import Follower
from kvist_controller.instance import Instance
from kvist_controller.plain import from_struct
from kvist_controller.published import PublishedState
from kvist_controller.records import Keys, LeaderRecord, ServiceRecord
from kvist_controller.settings import RegistrySettings
from kvist_controller.silence import Silence, Suspect
from support.control_plane import ClusterReader, ControlPlane, ScriptedAgent, control_plane, manifest

LIMIT_SECONDS = 30


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with asyncio.timeout(LIMIT_SECONDS), control_plane(tmp_path / "s.sqlite") as plane:
        yield plane


async def apply(plane: ControlPlane, resource: pb.Resource, **options: object) -> pb.ApplyResponse:
    with rpc_errors():
        return await plane.stub.Apply(pb.ApplyRequest(resource=resource, **options))


async def refused(call: object) -> KvistError:
    with pytest.raises(KvistError) as caught, rpc_errors():
        await call
    return caught.value


async def until_status(plane: ControlPlane, name: str, condition: object) -> dict:
    call = plane.stub.Watch(pb.WatchRequest(kind="ModelService"))
    while True:
        response = await call.read()
        if response.resource.metadata.name == name:
            status = from_struct(response.resource.status)
            if status and condition(status):
                call.cancel()
                return status


def ready_condition(status: dict) -> str:
    return next(condition["status"] for condition in status["conditions"] if condition["type"] == "Ready")


# Resources.


async def test_apply_says_what_it_did(plane: ControlPlane) -> None:
    first = await apply(plane, manifest(replicas=0))
    assert first.result == pb.APPLY_RESULT_CREATED
    assert first.resource.metadata.generation == 1
    assert from_struct(first.resource.spec)["drainTimeout"] == "30s"
    assert (await apply(plane, manifest(replicas=0))).result == pb.APPLY_RESULT_UNCHANGED
    changed = await apply(plane, manifest(replicas=0, aliases=["small"]))
    assert changed.result == pb.APPLY_RESULT_CONFIGURED
    assert changed.resource.metadata.generation == 2
    assert changed.resource.metadata.uid == first.resource.metadata.uid
    got = await plane.stub.Get(pb.GetRequest(kind="ModelService", name="smol"))
    assert from_struct(got.resource.spec)["aliases"] == ["small"]


async def test_validation_alone_changes_nothing(plane: ControlPlane) -> None:
    assert (await apply(plane, manifest(), validate_only=True)).result == pb.APPLY_RESULT_CREATED
    failure = await refused(plane.stub.Get(pb.GetRequest(kind="ModelService", name="smol")))
    assert failure.code == "NOT_FOUND"


async def test_what_the_store_did_not_take_is_not_said_to_be_done(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that tries again while the store is away is not told that nothing has to change."""
    commit = plane.store.commit

    async def fail(*_: object, **__: object) -> None:
        raise StoreError("nobody answers")

    async def stored() -> dict[str, ServiceRecord]:
        items = (await plane.store.list(Keys("test").resources("ModelService"))).items
        records = [ServiceRecord.decode(item.value, resource_version=item.mod_revision) for item in items]
        return {record.name: record for record in records}

    async def insist(call: functools.partial) -> object:
        monkeypatch.setattr(plane.store, "commit", fail)
        for _ in range(2):
            assert (await refused(call())).code == "NOT_READY"
        monkeypatch.setattr(plane.store, "commit", commit)
        return await call()

    await apply(plane, manifest())
    await insist(functools.partial(plane.stub.Apply, pb.ApplyRequest(resource=manifest(aliases=["other"]))))
    assert (await stored())["smol"].spec["aliases"] == ["other"]
    await insist(functools.partial(plane.stub.Apply, pb.ApplyRequest(resource=manifest("new"))))
    assert "new" in await stored()
    await insist(functools.partial(plane.stub.Delete, pb.DeleteRequest(kind="ModelService", name="smol")))
    record = (await stored()).get("smol")
    assert record is None or record.deleted_at_unix_nanos is not None


async def test_a_wrong_manifest_is_refused_with_every_field(plane: ControlPlane) -> None:
    resource = manifest(replicaz=2, drainTimeout="soon")
    resource.metadata.name = "Smol"
    failure = await refused(plane.stub.Apply(pb.ApplyRequest(resource=resource)))
    assert failure.code == "INVALID_MANIFEST"
    assert {violation.field for violation in failure.fields} == {
        "metadata.name",
        "spec.replicaz",
        "spec.drainTimeout",
    }


async def test_a_served_name_belongs_to_one_service(plane: ControlPlane) -> None:
    await apply(plane, manifest("one", replicas=0, aliases=["shared"]))
    failure = await refused(plane.stub.Apply(pb.ApplyRequest(resource=manifest("two", model="shared"))))
    assert failure.code == "INVALID_MANIFEST"
    assert [violation.field for violation in failure.fields] == ["spec.model"]


async def test_a_stale_resource_version_is_a_conflict(plane: ControlPlane) -> None:
    await apply(plane, manifest(replicas=0))
    stale = manifest(replicas=1)
    stale.metadata.resource_version = "1"
    failure = await refused(plane.stub.Apply(pb.ApplyRequest(resource=stale)))
    assert failure.code == "CONFLICT"


async def test_pages_are_by_name_and_complete(plane: ControlPlane) -> None:
    for name in ("c", "a", "b"):
        await apply(plane, manifest(name, replicas=0))
    page = await plane.stub.List(pb.ListRequest(kind="ModelService", page_size=2))
    assert [resource.metadata.name for resource in page.resources] == ["a", "b"]
    rest = await plane.stub.List(pb.ListRequest(kind="ModelService", page_size=2, page_token=page.next_page_token))
    assert [resource.metadata.name for resource in rest.resources] == ["c"]
    assert rest.next_page_token == ""


async def test_an_unknown_kind_and_an_unknown_name_are_refused(plane: ControlPlane) -> None:
    assert (await refused(plane.stub.List(pb.ListRequest(kind="Pod")))).code == "INVALID_ARGUMENT"
    assert (await refused(plane.stub.Delete(pb.DeleteRequest(kind="ModelService", name="x")))).code == "NOT_FOUND"


async def test_a_watch_sees_what_is_there_then_each_change(plane: ControlPlane) -> None:
    await apply(plane, manifest(replicas=0))
    call = plane.stub.Watch(pb.WatchRequest(kind="ModelService"))
    types = []
    while pb.WATCH_EVENT_TYPE_SYNCED not in types:
        types.append((await call.read()).type)
    assert types == [pb.WATCH_EVENT_TYPE_APPLIED, pb.WATCH_EVENT_TYPE_SYNCED]
    await plane.stub.Delete(pb.DeleteRequest(kind="ModelService", name="smol"))
    while (event := await call.read()).type != pb.WATCH_EVENT_TYPE_DELETED:
        assert event.type == pb.WATCH_EVENT_TYPE_APPLIED
    assert event.resource.metadata.name == "smol"


# Registration and cluster state.


async def test_a_ready_worker_reaches_routers_and_the_status(plane: ControlPlane) -> None:
    cluster = ClusterReader(plane.stub)
    async with ScriptedAgent(plane.stub) as agent:
        assert agent.welcome.cluster == "test"
        assert agent.welcome.hash_seed == plane.controller.hash_seed
        await apply(plane, manifest(replicas=1, aliases=["small"], engine={"name": "sim", "arguments": {"blocks": 8}}))
        await agent.until(lambda: agent.assignment.workers)
        [spec] = agent.assignment.workers
        assert agent.assignment.fence == plane.controller.fence
        assert spec.worker_uid.startswith("smol-")
        assert from_struct(spec.engine_arguments) == {"blocks": 8}
        agent.make_ready(spec, incarnation=100)
        await agent.beat()
        state = await cluster.until(lambda state: state.workers)
        [worker] = state.workers
        assert (worker.incarnation, worker.target.address, worker.draining) == (100, "127.0.0.1:100", False)
        [model] = state.models
        assert (model.name, list(model.aliases)) == ("smol", ["small"])
        assert (model.pools[0].tokenizer_digest, model.pools[0].hash_unit_tokens) == ("aa", 16)
        status = await until_status(plane, "smol", lambda status: ready_condition(status) == "True")
        assert status["replicas"] == {"desired": 1, "active": 1, "ready": 1, "updated": 1, "draining": 0}
        versions = [(state.version.store_epoch, state.version.revision) for state in cluster.states]
        assert versions == sorted(set(versions))


async def test_a_worker_with_another_tokenizer_is_refused_with_the_reason(plane: ControlPlane) -> None:
    async with ScriptedAgent(plane.stub) as agent:
        await apply(plane, manifest(replicas=2))
        await agent.until(lambda: len(agent.assignment.workers) == 2)
        first, second = agent.assignment.workers
        agent.make_ready(first, incarnation=100)
        await agent.beat()
        await agent.until(lambda: first.worker_uid in agent.verdicts)
        agent.make_ready(second, incarnation=200, tokenizer_digest="bb")
        await agent.beat()
        await agent.until(lambda: second.worker_uid in agent.verdicts)
        assert agent.verdicts[first.worker_uid].refused_reason == ""
        assert "tokenizer" in agent.verdicts[second.worker_uid].refused_reason
        [node] = (await plane.stub.ListNodes(pb.ListNodesRequest())).nodes
        [shown] = [worker for worker in node.workers if worker.spec.worker_uid == second.worker_uid]
        assert shown.phase == WORKER_PHASE_REFUSED
        assert "tokenizer" in shown.message
        status = await until_status(plane, "smol", lambda status: second.worker_uid in status["message"])
        assert ready_condition(status) == "False"
        assert [worker.target.worker_uid for worker in plane.controller.cluster_state.workers] == [first.worker_uid]


async def test_a_death_withdraws_the_worker_and_is_repeated_to_routers(plane: ControlPlane) -> None:
    cluster = ClusterReader(plane.stub)
    async with ScriptedAgent(plane.stub) as agent:
        await apply(plane, manifest())
        await agent.until(lambda: agent.assignment.workers)
        [spec] = agent.assignment.workers
        agent.make_ready(spec, incarnation=100)
        await agent.beat()
        await cluster.until(lambda state: state.workers)
        status = agent.workers[spec.worker_uid]
        status.phase = WORKER_PHASE_BACKING_OFF
        status.dead_incarnation = 100
        status.ClearField("description")
        await agent.beat()
        state = await cluster.until(lambda state: not state.workers)
        assert [(dead.worker_uid, dead.incarnation) for dead in state.dead_incarnations] == [(spec.worker_uid, 100)]
        agent.make_ready(spec, incarnation=101)
        await agent.beat()
        state = await cluster.until(lambda state: state.workers)
        assert state.workers[0].incarnation == 101


async def test_scaling_down_and_deletion_drain_before_they_remove(plane: ControlPlane) -> None:
    cluster = ClusterReader(plane.stub)
    async with ScriptedAgent(plane.stub) as agent:
        await apply(plane, manifest(replicas=2))
        await agent.until(lambda: len(agent.assignment.workers) == 2)
        for number, spec in enumerate(agent.assignment.workers):
            agent.make_ready(spec, incarnation=100 + number)
        await agent.beat()
        await cluster.until(lambda state: len(state.workers) == 2)
        await apply(plane, manifest(replicas=1))
        state = await cluster.until(lambda state: any(worker.draining for worker in state.workers))
        [draining] = [worker.target.worker_uid for worker in state.workers if worker.draining]
        assert draining.endswith("-1")
        await agent.until(lambda: len(agent.assignment.workers) == 1)
        del agent.workers[draining]
        await agent.beat()
        await cluster.until(lambda state: len(state.workers) == 1)
        await plane.stub.Delete(pb.DeleteRequest(kind="ModelService", name="smol"))
        await agent.until(lambda: not agent.assignment.workers)
        state = await cluster.until(lambda state: state.models and state.models[0].deleting)
        assert state.workers[0].draining
        agent.workers.clear()
        await agent.beat()
        await cluster.until(lambda state: not state.models and not state.workers)


async def test_a_rollout_serves_throughout(plane: ControlPlane) -> None:
    async with ScriptedAgent(plane.stub) as agent:
        await apply(plane, manifest(replicas=1))
        await agent.until(lambda: agent.assignment.workers)
        [old] = agent.assignment.workers
        agent.make_ready(old, incarnation=100)
        await agent.beat()
        await agent.until(lambda: old.worker_uid in agent.verdicts)
        await apply(plane, manifest(replicas=1, engine={"name": "sim", "arguments": {"blocks": 8}}))
        await agent.until(lambda: len(agent.assignment.workers) == 2)
        [new] = [spec for spec in agent.assignment.workers if spec.worker_uid != old.worker_uid]
        assert new.pool_revision != old.pool_revision
        agent.make_ready(new, incarnation=200)
        await agent.beat()
        await agent.until(lambda: len(agent.assignment.workers) == 1)
        assert agent.assignment.workers[0] == new


async def test_replicas_of_a_silent_node_move_after_its_lease_and_the_patience(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(LIMIT_SECONDS),
        control_plane(tmp_path / "s", lease_seconds=0.5, replace_after_seconds=0.2) as plane,
    ):
        async with ScriptedAgent(plane.stub, uid="node-a") as first:
            await apply(plane, manifest())
            await first.until(lambda: first.assignment.workers)
        async with ScriptedAgent(plane.stub, uid="node-b") as second, asyncio.TaskGroup() as group:

            async def beat() -> None:
                while True:
                    await second.beat()
                    await asyncio.sleep(0.05)

            beating = group.create_task(beat())
            await second.until(lambda: second.assignment.workers)
            beating.cancel()
        assert second.assignment.workers[0].worker_uid != first.assignment.workers[0].worker_uid
        # Should the silent node come back, it is told to end what was replaced.
        async with ScriptedAgent(plane.stub, uid="node-a") as back:
            await back.until(lambda: back.assignment.assignment_number)
            assert not back.assignment.workers


async def test_what_serves_on_a_silent_node_is_not_replaced(tmp_path: Path) -> None:
    """Its agent is gone for longer than any patience; the worker is asked before it is given up."""
    lives = True

    async def ask(_: Suspect) -> bool:
        return lives

    async with (
        asyncio.timeout(LIMIT_SECONDS),
        control_plane(tmp_path / "s", lease_seconds=0.5, replace_after_seconds=0.1, silence=Silence(ask)) as plane,
        asyncio.TaskGroup() as group,
    ):
        reader = ClusterReader(plane.stub)
        async with ScriptedAgent(plane.stub, uid="node-a") as first:
            await apply(plane, manifest())
            await first.until(lambda: first.assignment.workers)
            first.make_ready(first.assignment.workers[0], incarnation=100)
            await first.beat()
            before = await reader.until(lambda state: len(state.workers) == 1)
        async with ScriptedAgent(plane.stub, uid="node-b") as second:

            async def beat() -> None:
                while True:
                    await second.beat()
                    await asyncio.sleep(0.05)

            beating = group.create_task(beat())
            await second.until(lambda: second.assignment.assignment_number)
            while any(node.present for node in await nodes_of(plane) if node.inventory.node_uid == "node-a"):
                await asyncio.sleep(0.05)
            # Longer than lease, patience and questions together.
            await asyncio.sleep(2)
            assert not second.assignment.workers
            assert list(before.workers) == list(plane.controller.cluster_state.workers)
            lives = False
            await second.until(lambda: second.assignment.workers)
            beating.cancel()


async def nodes_of(plane: ControlPlane) -> list[pb.NodeEntry]:
    return list((await plane.stub.ListNodes(pb.ListNodesRequest())).nodes)


async def test_a_worker_that_is_silent_with_its_node_leaves_after_the_lease_and_comes_back_with_it(
    tmp_path: Path,
) -> None:
    """R33."""
    lives = {"lives": True}

    async def ask(suspect: Suspect) -> bool:
        return lives[suspect.worker_uid]

    async with (
        asyncio.timeout(LIMIT_SECONDS),
        control_plane(tmp_path / "s", lease_seconds=0.5, silence=Silence(ask)) as plane,
    ):
        reader = ClusterReader(plane.stub)
        async with ScriptedAgent(plane.stub) as agent:
            await apply(plane, manifest(replicas=2))
            await agent.until(lambda: len(agent.assignment.workers) == 2)
            first, second = agent.assignment.workers
            lives |= {first.worker_uid: True, second.worker_uid: False}
            agent.make_ready(first, incarnation=100)
            agent.make_ready(second, incarnation=101)
            await agent.beat()
            before = await reader.until(lambda state: len(state.workers) == 2)
        # The agent is gone. One of its workers answers the controller, and goes on serving.
        after = await reader.until(lambda state: len(state.workers) == 1)
        assert [first.worker_uid] == [worker.target.worker_uid for worker in after.workers]
        # Nobody has seen the other die: it may come back as what it was.
        assert not after.dead_incarnations
        status = await until_status(plane, "smol", lambda status: status["replicas"]["ready"] == 1)
        assert "its node is silent, and it does not answer" in str(status["conditions"])
        back = ScriptedAgent(plane.stub)
        back.workers = agent.workers
        async with back:
            again = await reader.until(lambda state: len(state.workers) == 2)
        assert list(again.workers) == list(before.workers)


async def test_who_answers_for_another_or_not_at_all_is_silent() -> None:
    async with asyncio.timeout(LIMIT_SECONDS), asyncio.TaskGroup() as group:
        server = await asyncio.start_server(lambda *_: asyncio.sleep(LIMIT_SECONDS), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        mute = Suspect("mute", f"127.0.0.1:{port}", 1)
        silence, changed = Silence(), asyncio.Event()
        watching = group.create_task(silence.watch(lambda: [mute], changed.set))
        assert not silence.workers([mute])
        await changed.wait()
        assert silence.workers([mute]) == {"mute"}
        # Another incarnation of it is another suspect.
        assert not silence.workers([Suspect("mute", mute.address, 2)])
        watching.cancel()
        server.close()


async def test_a_restarted_controller_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        async with control_plane(tmp_path / "s") as plane, ScriptedAgent(plane.stub) as agent:
            await apply(plane, manifest())
            await agent.until(lambda: agent.assignment.workers)
            [spec] = agent.assignment.workers
            agent.make_ready(spec, incarnation=100)
            await agent.beat()
            before = await ClusterReader(plane.stub).until(lambda state: state.workers)
            fence = plane.controller.fence
        async with control_plane(tmp_path / "s") as plane:
            # Nothing is published that would tell routers of fewer workers, before any agent has come back.
            assert plane.controller.cluster_state == before
            assert plane.controller.fence > fence
            reader = plane.stub.WatchCluster(pb.WatchClusterRequest(known_version=before.version))
            assert not (await reader.read()).HasField("state")
            again = ScriptedAgent(plane.stub)
            again.workers = agent.workers
            async with again:
                await again.until(lambda: again.assignment.workers)
                assert list(again.assignment.workers) == [spec]
                assert again.assignment.fence == plane.controller.fence
            assert plane.controller.cluster_state == before


async def test_a_session_begins_with_hello(plane: ControlPlane) -> None:
    call = plane.stub.Register()
    await call.write(pb.RegisterRequest(heartbeat=pb.Heartbeat()))
    assert (await refused(call.read())).code == "INVALID_ARGUMENT"


class HungUp:
    """A call whose client is gone when it is to be told something."""

    def __init__(self, words: int) -> None:
        self.words = words

    async def write(self, _: pb.RegisterResponse) -> None:
        self.words -= 1
        if self.words < 0:
            raise grpc.aio.InternalError("the connection is gone")


@pytest.mark.parametrize("words", [0, 1])
async def test_an_agent_that_hangs_up_meanwhile_is_no_fault(plane: ControlPlane, words: int) -> None:
    async def nothing_more() -> AsyncIterator[pb.RegisterRequest]:
        await asyncio.Event().wait()
        yield pb.RegisterRequest()

    hello = pb.AgentHello(inventory=NodeInventory(node_uid="node-h", name="node-h"), address="127.0.0.1:1")
    hello.pulse_interval.FromMilliseconds(50)
    instance = Instance(
        LeaderRecord("test", ""),
        Follower(plane.store, Keys("test"), PublishedState()),
        PublishedState(),
    )
    instance.set_leading(plane.controller)
    async with asyncio.timeout(LIMIT_SECONDS):
        await AgentSession(instance, hello, HungUp(words), RegistrySettings()).run(nothing_more())


async def test_who_asks_for_signs_of_life_has_one_at_once(plane: ControlPlane) -> None:
    """So that a connection that is cut right after the first word is missed as well."""
    hello = pb.AgentHello(inventory=NodeInventory(node_uid="node-p", name="node-p"), address="127.0.0.1:1")
    hello.pulse_interval.FromSeconds(3_600)
    session = plane.stub.Register(timeout=30)
    await session.write(pb.RegisterRequest(hello=hello))
    first = await session.read()
    assert isinstance(first, pb.RegisterResponse)
    assert first.HasField("pulse")
    session.cancel()
    request = pb.WatchClusterRequest(subscriber="test")
    request.pulse_interval.FromSeconds(3_600)
    watch = plane.stub.WatchCluster(request, timeout=30)
    state = await watch.read()
    assert isinstance(state, pb.WatchClusterResponse)
    assert state.pulse
    watch.cancel()


async def test_an_attached_engine_reaches_routers_and_outlives_a_controller(tmp_path: Path) -> None:
    engine = AttachedEngine(worker_uid="attached-a-stock", name="stock", model="m", incarnation=7, ranks=2)
    async with asyncio.timeout(LIMIT_SECONDS):
        async with control_plane(tmp_path / "s") as plane, ScriptedAgent(plane.stub, uid="node-a") as agent:
            agent.attached = [engine]
            await agent.beat()
            state = await ClusterReader(plane.stub).until(lambda state: state.attached)
            assert list(state.attached) == [
                pb.AttachedEntry(engine=engine, node_uid="node-a", agent_address="127.0.0.1:1")
            ]
            nodes = await plane.stub.ListNodes(pb.ListNodesRequest())
            assert [[engine]] == [list(node.attached) for node in nodes.nodes]
            assert not state.workers, "it is no target"
        async with control_plane(tmp_path / "s", lease_seconds=0.1, replace_after_seconds=0.1) as plane:
            # Known before its agent has come back, and gone when that stays away for too long.
            assert list(plane.controller.cluster_state.attached) == list(state.attached)
            await ClusterReader(plane.stub).until(lambda state: not state.attached)
