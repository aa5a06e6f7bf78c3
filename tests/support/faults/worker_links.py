"""Links between a router and workers are slow, or swallow everything.

Workers say themselves where they listen, so a router of its own finds them by links that a static cluster state names.
It has clients of its own, whose requests are held against the engines' record as those of the steady load are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from google.protobuf import json_format

from kvist.controller.v1.controller_pb2 import ClusterState
from support.engine_record import EngineRequest, check_outcomes, read_engine_records
from support.failover import LIMIT_SECONDS, MODEL, Scene
from support.faults.controllers import until_served
from support.scrape import scrape
from support.steady_load import SteadyLoad
from support.toxiproxy import Link

CLIENTS = 3
DELAY_MILLISECONDS = 150
JITTER_MILLISECONDS = 50
KILOBYTES_PER_SECOND = 64


@dataclass(slots=True)
class LinkedRouter:
    """A router whose connections to workers may be ill.

    Attributes:
        name: Of its process.
        load: Its clients.
        links: To the workers, by `<worker uid>.<incarnation>`.
    """

    name: str
    load: SteadyLoad
    links: dict[str, Link]

    def records(self, scene: Scene) -> list[EngineRequest]:
        """What engines wrote down of its clients' requests."""
        records = read_engine_records(scene.mesh.record_folder, routers=scene.mesh.routers)
        return [record for record in records if record.request_id.startswith(self.load.prefix)]


@contextlib.asynccontextmanager
async def _linked_router(scene: Scene, name: str) -> AsyncIterator[LinkedRouter]:
    mesh = scene.mesh
    state = ClusterState()
    state.CopyFrom(mesh.state)
    links = {}
    for worker in state.workers:
        engine = f"{worker.target.worker_uid}.{worker.incarnation}"
        link = links[engine] = await mesh.toxiproxy.link(
            f"{name}-{engine}", int(worker.target.address.rpartition(":")[2])
        )
        worker.target.address = link.address
    file = mesh.folder / f"{name}.static.json"
    file.write_text(json_format.MessageToJson(state))
    mesh.further_routers.append(name)
    settings = {"name": name, "cluster_state_file": file, "worker_threads": 2, "drain_seconds": 1}
    service = await mesh.start_service(name, "router", settings)
    try:
        edge = str(service.addresses["http_address"])
        await until_served(edge)
        router = LinkedRouter(name, SteadyLoad(lambda: [edge], MODEL, clients=CLIENTS), links)
        await _until_all_are_ready(scene, name)
        async with router.load.running():
            await router.load.until_finished(CLIENTS, limit_seconds=LIMIT_SECONDS)
            yield router
    finally:
        await mesh.kill(name)
        del mesh.services[name]


async def _until_all_are_ready(scene: Scene, name: str) -> None:
    address = scene.mesh.services[name].admin_address
    async with asyncio.timeout(LIMIT_SECONDS):
        while (await scrape(address)).get("kvist_router_targets ready") != scene.workers:
            await asyncio.sleep(0.1)


async def worker_links_are_slow(scene: Scene) -> None:
    """Answers come later, and that is all."""
    async with _linked_router(scene, "router-far-away") as router:
        load = router.load
        name = "slow links between a router and its workers: what was asked since has finished"
        async with scene.step(name, limit_seconds=5) as step:
            for link in router.links.values():
                await link.delay(milliseconds=DELAY_MILLISECONDS, jitter_milliseconds=JITTER_MILLISECONDS)
                await link.narrow(kilobytes_per_second=KILOBYTES_PER_SECOND)
            step.begin()
            begun = load.started
            await scene.until_true(
                "requests that came since have finished",
                lambda: sum(outcome.number >= begun for outcome in load.outcomes) >= CLIENTS,
            )
            step.end()
    assert [] == load.bad()
    check_outcomes(load.outcomes, router.records(scene), killed_engines=scene.killed_engines)


async def worker_link_is_black_holed(scene: Scene) -> None:
    """The worker computes and nobody hears it: the router finds out by itself, and goes elsewhere."""
    async with _linked_router(scene, "router-half-deaf") as router:
        load = router.load
        async with asyncio.timeout(LIMIT_SECONDS):
            while not (busy := _running(scene, router)):
                await asyncio.sleep(0.005)
        engine = busy[0].engine
        name = "link to a worker black-holed: its clients are told, or have another one's"
        # Five seconds of silence, and the whole of another one's answer.
        async with scene.step(name, limit_seconds=8) as step:
            await router.links[engine].black_hole()
            step.begin()
            # Clients of the others go on meanwhile.
            lost = {record.request_id for record in router.records(scene) if record.engine == engine}
            concerned = lost & set(load.running_attempts)
            await scene.until_true("all of its requests have ended", lambda: not concerned & set(load.running_attempts))
            step.end()
        for outcome in load.bad():
            assert outcome.attempts[-1].request_id in lost, outcome
            assert outcome.attempts[-1].text_at, outcome
            assert "engine_lost" in outcome.attempts[-1].detail, outcome
        bad = len(load.bad())
        # Without it, and with it again.
        await load.until_finished(2 * CLIENTS, limit_seconds=LIMIT_SECONDS)
        await router.links[engine].heal()
        await _until_all_are_ready(scene, router.name)
        await load.until_finished(2 * CLIENTS, limit_seconds=LIMIT_SECONDS)
        assert bad == len(load.bad())
    check_outcomes(load.outcomes, router.records(scene), killed_engines=scene.killed_engines, unheard_engines={engine})


def _running(scene: Scene, router: LinkedRouter) -> list[EngineRequest]:
    """Requests of the router's clients that an engine computes at this moment."""
    return [
        record
        for record in router.records(scene)
        if record.reason is None and record.request_id in router.load.running_attempts
    ]
