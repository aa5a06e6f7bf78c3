"""An agent's session with a controller: registration, assignment, death, and a controller that comes back."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import grpc
import pytest

from kvist.controller.v1 import controller_pb2 as pb
from kvist.errors import from_rpc_error
from kvist_agent.slot_files import StateFolder
from support.agent_session import agent_of
from support.control_plane import ClusterReader, ScriptedAgent, control_plane, manifest

LIMIT_SECONDS = 40


async def test_an_applied_service_is_served_and_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(LIMIT_SECONDS),
        control_plane(tmp_path / "s") as plane,
        # The first address refuses; the agent goes on to the next.
        agent_of(tmp_path / "agent", ["127.0.0.1:9", plane.address]) as slots,
    ):
        cluster = ClusterReader(plane.stub)
        await plane.stub.Apply(pb.ApplyRequest(resource=manifest(replicas=1)))
        state = await cluster.until(lambda state: state.workers)
        [status] = slots.statuses()
        assert state.workers[0].target.address == status.address
        incarnation = state.workers[0].incarnation
        os.kill(status.process_id, signal.SIGKILL)
        dead = await cluster.until(lambda state: not state.workers)
        assert [death.incarnation for death in dead.dead_incarnations] == [incarnation]
        state = await cluster.until(lambda state: state.workers)
        assert state.workers[0].incarnation > incarnation
        assert state.workers[0].target.worker_uid == status.spec.worker_uid
        await plane.stub.Delete(pb.DeleteRequest(kind="ModelService", name="smol"))
        await cluster.until(lambda state: not state.models)
        assert slots.statuses() == []


async def test_workers_run_on_while_the_controller_is_away(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_SECONDS), contextlib.AsyncExitStack() as stack:
        async with control_plane(tmp_path / "s") as plane:
            address = plane.address
            slots = await stack.enter_async_context(agent_of(tmp_path / "agent", [address]))
            await plane.stub.Apply(pb.ApplyRequest(resource=manifest(replicas=1)))
            before = await ClusterReader(plane.stub).until(lambda state: state.workers)
            process_id = slots.statuses()[0].process_id
        async with control_plane(tmp_path / "s", listen=address) as plane:
            while not any(node.heard_at.seconds for node in plane.controller.node_entries()):
                await plane.controller.order_changes.after(plane.controller.order_changes.number)
            assert plane.controller.cluster_state == before
            assert slots.statuses()[0].process_id == process_id


async def test_an_agent_joins_with_the_right_token_alone_and_as_soon_as_it_has_it(tmp_path: Path) -> None:
    wanted, shown = tmp_path / "wanted", tmp_path / "shown"
    wanted.write_text("a" * 32)
    shown.write_text("b" * 32)
    async with (
        asyncio.timeout(LIMIT_SECONDS),
        control_plane(tmp_path / "s", join_token_file=wanted) as plane,
        agent_of(tmp_path / "without", [plane.address]),
        agent_of(tmp_path / "wrong", [plane.address], join_token_file=shown),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ScriptedAgent(plane.stub).__aenter__()
        refusal = from_rpc_error(caught.value)
        assert refusal.code == "PERMISSION_DENIED"
        assert "join_token_file" in refusal.message
        assert plane.controller.node_entries() == []
        # The agent reads its file again, and the controller did not have to be asked twice.
        shown.write_text("a" * 32)
        while not plane.controller.node_entries():
            await plane.controller.order_changes.after(plane.controller.order_changes.number)
        assert [node.inventory.node_uid for node in plane.controller.node_entries()] == [
            StateFolder(tmp_path / "wrong").node_uid()
        ]
