"""Agents, workers and routers die. What was running there ends as it may, and nothing else notices."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from kvist.agent.v1.agent_pb2 import WorkerStatus
from support.engine_record import EngineRequest, read_engine_records
from support.failover import LIMIT_SECONDS, Scene
from support.faults.controllers import until_agents_are_heard
from support.steady_load import Outcome

MOST_TRIES = 8


async def agent_is_killed(scene: Scene) -> None:
    """Its workers go on serving, and are the same when it comes back."""
    mesh, load = scene.mesh, scene.load
    name = mesh.agents[0]
    before = len(load.outcomes)
    workers = _running(await mesh.workers())
    await mesh.kill(name)
    # Each worker has served without its agent.
    await load.until_finished(25, limit_seconds=LIMIT_SECONDS)
    assert [] == load.bad(since=before)
    async with scene.step("agent back: it has its workers again", limit_seconds=8) as step:
        started = time.time()
        await mesh.start_again(name)
        await until_agents_are_heard(mesh, since=started)
        async with asyncio.timeout(LIMIT_SECONDS):
            while _running(await mesh.workers()) != workers:
                await asyncio.sleep(0.05)
        step.end()


async def worker_is_killed_before_its_first_token(scene: Scene) -> None:
    """Another worker answers, and the client cannot tell."""
    async with scene.step("worker killed before a first token: its client has one", limit_seconds=5) as step:
        killed_at, concerned = await _kill_worker(scene, has_text=False, kind="finished")
        texts = [outcome.attempts[-1].text_at for outcome in concerned]
        step.seconds = max(text for text in texts if text is not None) - killed_at


async def worker_is_killed_after_its_first_token(scene: Scene) -> None:
    """The client is told, with an error and no invented ending."""
    async with scene.step("worker killed after a first token: its client is told", limit_seconds=5) as step:
        killed_at, concerned = await _kill_worker(scene, has_text=True, kind="failed")
        step.seconds = max(outcome.ended for outcome in concerned) - killed_at
    async with scene.step("worker killed: its slot serves again", limit_seconds=10) as step:
        step.seconds = await _kill_and_wait_for_slot(scene)


async def worker_is_frozen(scene: Scene) -> None:
    """Its connections stay open and nothing comes through: routers find out by themselves, and go elsewhere."""
    async with asyncio.timeout(LIMIT_SECONDS):
        engines = {_engine(worker): worker for worker in (await scene.mesh.workers()).values()}
        while not (busy := [r for r in _open(scene) if r.request_id in scene.load.running_attempts]):
            await asyncio.sleep(0.005)
    victim = engines[busy[0].engine]
    async with scene.step("worker frozen: its clients are told, or have another one's", limit_seconds=6) as step:
        os.kill(victim.process_id, signal.SIGSTOP)
        try:
            frozen_at = time.monotonic()
            lost = frozenset(record.request_id for record in _open(scene) if record.engine == _engine(victim))
            concerned = await _outcomes_of(scene, lost)
        finally:
            os.kill(victim.process_id, signal.SIGCONT)
        # Told by an error, or by the first text of another one's answer.
        told = [one.ended if one.kind == "failed" else one.attempts[-1].text_at or one.ended for one in concerned]
        step.seconds = max(told) - frozen_at
    for outcome in concerned:
        assert outcome.kind == "finished" or "engine_lost" in outcome.attempts[-1].detail, outcome
        assert outcome.kind == "finished" or outcome.attempts[-1].text_at, outcome
    # It goes on as the same engine: nobody took it for dead.
    await scene.load.until_finished(20, limit_seconds=LIMIT_SECONDS)
    assert _engine(victim) in {_engine(worker) for worker in (await scene.mesh.workers()).values()}


async def _kill_worker(scene: Scene, *, has_text: bool, kind: str) -> tuple[float, list[Outcome]]:
    """Kills the worker of a request that is where the test wants it.

    A request may go on between the look and the kill, so that it takes several tries at times.

    Returns:
        When the worker was killed, and the requests that it was computing and that ended as they should.
    """
    load = scene.load
    for _ in range(MOST_TRIES):
        async with asyncio.timeout(LIMIT_SECONDS):
            engines = {_engine(worker): worker for worker in (await scene.mesh.workers()).values()}
            while not (meant := [r for r in _open(scene) if load.running_attempts.get(r.request_id) is has_text]):
                await asyncio.sleep(0.005)
        victim = engines[meant[0].engine]
        killed_at, lost = _kill(scene, victim)

        concerned = await _outcomes_of(scene, lost)
        await _until_slot_serves(scene, victim)
        for outcome in concerned:
            # Whoever had a piece of the text cannot be given another one's; whoever had none notices nothing.
            assert outcome.kind == "finished" or outcome.attempts[-1].text_at, outcome
            assert outcome.kind == "finished" or "engine_lost" in outcome.attempts[-1].detail, outcome
        found = [outcome for outcome in concerned if outcome.kind == kind]
        if found:
            return killed_at, found
    raise AssertionError(f"no request was where it should be in {MOST_TRIES} tries")


async def _outcomes_of(scene: Scene, request_ids: frozenset[str]) -> list[Outcome]:
    """What became of the requests with these ids, when all of them have ended."""

    def ended() -> list[Outcome]:
        return [o for o in scene.load.outcomes if request_ids & {attempt.request_id for attempt in o.attempts}]

    await scene.until_true("all of its requests have ended", lambda: len(ended()) == len(request_ids))
    return ended()


async def _kill_and_wait_for_slot(scene: Scene) -> float:
    victim = next(iter((await scene.mesh.workers()).values()))
    killed_at, _ = _kill(scene, victim)
    await _until_slot_serves(scene, victim)
    return time.monotonic() - killed_at


def _kill(scene: Scene, victim: WorkerStatus) -> tuple[float, frozenset[str]]:
    """Kills a worker; when that was, and which requests it has not ended."""
    os.kill(victim.process_id, signal.SIGKILL)
    killed_at = time.monotonic()
    lost = frozenset(record.request_id for record in _open(scene) if record.engine == _engine(victim))
    scene.killed_engines.add(_engine(victim))
    return killed_at, lost


async def _until_slot_serves(scene: Scene, victim: WorkerStatus) -> None:
    uid, incarnation = victim.spec.worker_uid, victim.description.incarnation
    await scene.until_true(
        "its slot serves again",
        lambda: any(w.target.worker_uid == uid and w.incarnation > incarnation for w in scene.mesh.state.workers),
    )


def _open(scene: Scene) -> list[EngineRequest]:
    """Requests that an engine has taken and not ended."""
    records = read_engine_records(scene.mesh.record_folder, routers=scene.mesh.routers)
    return [record for record in records if record.reason is None and record.engine not in scene.killed_engines]


async def router_is_killed(scene: Scene) -> None:
    """Clients that try once more, at another router, lose nothing."""
    mesh, load = scene.mesh, scene.load
    before = len(load.outcomes)
    assert load.most_attempts == 2
    async with asyncio.timeout(LIMIT_SECONDS):
        while not load.running_attempts:
            await asyncio.sleep(0.005)
    await mesh.kill("router-0")
    killed_at = time.monotonic()
    await load.until_finished(25, limit_seconds=LIMIT_SECONDS)

    def torn() -> list[Outcome]:
        return [o for o in load.outcomes[before:] if o.started < killed_at and o.attempts[0].kind == "torn"]

    assert [] == load.bad(since=before)
    texts = [outcome.attempts[-1].text_at for outcome in torn()]
    async with scene.step("router killed: its clients have an answer from another", limit_seconds=2) as step:
        step.seconds = max(text for text in texts if text is not None) - killed_at
    await mesh.start_again("router-0")


def _engine(worker: WorkerStatus) -> str:
    """As its record is named."""
    return f"{worker.spec.worker_uid}.{worker.description.incarnation}"


def _running(workers: dict[str, WorkerStatus]) -> dict[str, tuple[int, int]]:
    return {uid: (worker.process_id, worker.description.incarnation) for uid, worker in workers.items()}
