"""A controller on an empty store meets agents whose workers were started for another one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvist.agent.v1.agent_pb2 import WORKER_PHASE_READY, WorkerSpec, WorkerStatus
from kvist.controller.v1 import controller_pb2 as pb
from support.control_plane import ControlPlane, ScriptedAgent, control_plane, manifest
from support.mesh import until

LIMIT_SECONDS = 30


def with_worker(agent: ScriptedAgent, *, hash_seed: int) -> ScriptedAgent:
    """An agent that runs a worker which this store has never known."""
    spec = WorkerSpec(worker_uid="smol-abc-0", model="smol", engine="sim", hash_seed=hash_seed)
    agent.workers["smol-abc-0"] = WorkerStatus(spec=spec, phase=WORKER_PHASE_READY, address="127.0.0.1:1")
    return agent


def strange_seed(plane: ControlPlane) -> int:
    return plane.controller.hash_seed ^ 1


async def test_workers_of_another_store_are_left_alone_until_a_resource_is_applied(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(LIMIT_SECONDS),
        control_plane(tmp_path / "s") as plane,
        with_worker(ScriptedAgent(plane.stub), hash_seed=strange_seed(plane)) as agent,
    ):
        await until("the controller knows", lambda: plane.controller.strange_workers == 1)
        # Orders are given at each reconciliation.
        await plane.controller.reconcile()
        assert plane.controller.orders(agent.uid).number == 0
        await plane.stub.Apply(pb.ApplyRequest(resource=manifest()))
        await agent.until(lambda: agent.assignment.assignment_number)
        # Somebody has said what shall run, and this is not part of it.
        assert agent.assignment.assignment_number == 1
        assert ["smol"] == [spec.model for spec in agent.assignment.workers]
        assert "smol-abc-0" not in {spec.worker_uid for spec in agent.assignment.workers}
        assert plane.controller.strange_workers == 0


async def test_the_next_leader_on_the_empty_store_waits_until_it_has_heard_of_a_node(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        async with control_plane(tmp_path / "s") as plane:
            async with with_worker(ScriptedAgent(plane.stub), hash_seed=strange_seed(plane)) as agent:
                await until("the controller knows", lambda: plane.controller.strange_workers == 1)
            workers = agent.workers
        async with control_plane(tmp_path / "s") as plane:
            # The store has the node, and nothing on it.
            await plane.controller.reconcile()
            assert ["node-a"] == [entry.inventory.node_uid for entry in plane.controller.node_entries()]
            assert plane.controller.orders("node-a").number == 0
            back = ScriptedAgent(plane.stub)
            back.workers = workers
            async with back:
                await until("the controller knows", lambda: plane.controller.strange_workers == 1)
                assert plane.controller.orders("node-a").number == 0


async def test_a_store_ends_what_was_started_for_it_though_it_has_no_resource_any_more(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(LIMIT_SECONDS),
        control_plane(tmp_path / "s") as plane,
        with_worker(ScriptedAgent(plane.stub), hash_seed=plane.controller.hash_seed) as agent,
    ):
        await agent.until(lambda: agent.assignment.assignment_number)
        assert [] == list(agent.assignment.workers)
        assert plane.controller.strange_workers == 0


async def test_a_node_without_workers_has_its_empty_orders(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(LIMIT_SECONDS),
        control_plane(tmp_path / "s") as plane,
        ScriptedAgent(plane.stub) as agent,
    ):
        await agent.until(lambda: agent.assignment.assignment_number)
        assert [] == list(agent.assignment.workers)
