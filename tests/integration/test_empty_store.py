"""The state store is replaced by an empty one under load: no worker is lost, and the right one is taken up again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from kvist.events.v1.events_pb2 import SOURCE_STATE_EXACT
from kvist.grpc import open_channel
from kvist.kvmaster.v1.kvmaster_pb2_grpc import KvMasterServiceStub
from kvist.router.v1.router_pb2_grpc import RouterServiceStub
from support.etcd_process import etcd_process
from support.failover import MODEL
from support.faults.controllers import until_served
from support.mesh import LIMIT_SECONDS, Mesh, running_mesh, until
from support.scrape import scrape
from support.steady_load import SteadyLoad

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

WORKERS = 2
ENGINE_ARGUMENTS = {"decodeStepMs": 10}
HELD = "kvist_router_cluster_state_held"
IGNORED = "kvist_cluster_states_ignored_total held"
STRANGE = "kvist_controller_strange_workers"


async def test_an_empty_store_ends_nothing_until_somebody_says_what_shall_run(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    async with running_mesh(mesh, agents=1, controller={"store.path": data / "state.sqlite"}):
        await _apply(mesh, replicas=WORKERS)
        await until("all workers are there", lambda: mesh.sees_workers(WORKERS))
        edge = str(mesh.services["router"].addresses["http_address"])
        await until_served(edge)
        old = {uid: worker.process_id for uid, worker in (await mesh.workers()).items()}
        epoch = mesh.state.version.store_epoch
        load = SteadyLoad(lambda: [edge], MODEL)
        async with load.running():
            await _restart_with_other_data(mesh, data, keep_as=tmp_path / "kept")
            await _until_metrics(
                mesh, {"controller": (STRANGE, WORKERS), "router": (HELD, 1), "kvmaster": (IGNORED, 1)}
            )
            assert mesh.state.version.store_epoch > epoch
            assert [] == list(mesh.state.workers)
            await load.until_finished(25, limit_seconds=LIMIT_SECONDS)

            # The next leader on the empty store knows the node, and as little of what runs there.
            await mesh.kill("controller")
            await mesh.start_again("controller")
            await _until_metrics(mesh, {"controller": (STRANGE, WORKERS)})
            await load.until_finished(25, limit_seconds=LIMIT_SECONDS)

            # Somebody has found the right data folder: all is as it was, and changes are taken.
            await _restart_with_other_data(mesh, data, keep_as=tmp_path / "empty", data=tmp_path / "kept")
            await until("the store is back", lambda: mesh.state.version.store_epoch == epoch)
            await _apply(mesh, replicas=WORKERS + 1)
            await until("the change is made", lambda: mesh.sees_workers(WORKERS + 1))
            await _until_metrics(mesh, {"controller": (STRANGE, 0), "router": (HELD, 0)})
            await _until_indexes_are_exact(mesh, WORKERS + 1)
            await load.until_finished(25, limit_seconds=LIMIT_SECONDS)
        assert [] == load.bad()
        now = {uid: worker.process_id for uid, worker in (await mesh.workers()).items()}
        assert old == {uid: process_id for uid, process_id in now.items() if uid in old}

        # It happens again, and this time a new beginning is meant.
        await _restart_with_other_data(mesh, data, keep_as=tmp_path / "given-up")
        await _until_metrics(mesh, {"controller": (STRANGE, WORKERS + 1), "router": (HELD, 1)})
        await _apply(mesh, replicas=1)
        await until("there is a new worker", lambda: mesh.sees_workers(1))
        assert mesh.state.workers[0].target.worker_uid not in now
        await _until_metrics(mesh, {"controller": (STRANGE, 0), "router": (HELD, 0)})
        await until_served(edge)
        await _until_indexes_are_exact(mesh, 1)


async def test_an_etcd_that_comes_up_empty_below_a_running_controller_ends_nothing(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    with etcd_process(tmp_path) as etcd:
        settings = {"store.kind": "etcd", "store.etcd.endpoints": etcd.address}
        async with running_mesh(mesh, agents=1, controller=settings):
            await _apply(mesh, replicas=WORKERS)
            await until("all workers are there", lambda: mesh.sees_workers(WORKERS))
            edge = str(mesh.services["router"].addresses["http_address"])
            await until_served(edge)
            old = {uid: worker.process_id for uid, worker in (await mesh.workers()).items()}
            load = SteadyLoad(lambda: [edge], MODEL)
            async with load.running():
                etcd.kill()
                (tmp_path / etcd.name).rename(tmp_path / "kept")
                etcd.start()
                await _until_metrics(mesh, {"controller": (STRANGE, WORKERS), "router": (HELD, 1)})
                await load.until_finished(25, limit_seconds=LIMIT_SECONDS)
                etcd.kill()
                (tmp_path / etcd.name).rename(tmp_path / "empty")
                (tmp_path / "kept").rename(tmp_path / etcd.name)
                etcd.start()
                await until("the store is back", lambda: mesh.sees_workers(WORKERS))
                await _until_metrics(mesh, {"controller": (STRANGE, 0), "router": (HELD, 0)})
                await _apply(mesh, replicas=WORKERS + 1)
                await until("the change is made", lambda: mesh.sees_workers(WORKERS + 1))
                await load.until_finished(25, limit_seconds=LIMIT_SECONDS)
            assert [] == load.bad()
            now = {uid: worker.process_id for uid, worker in (await mesh.workers()).items()}
            assert old == {uid: process_id for uid, process_id in now.items() if uid in old}


async def _apply(mesh: Mesh, *, replicas: int) -> None:
    """Applies the model service as soon as somebody leads."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            try:
                await mesh.apply(replicas=replicas, engine_arguments=ENGINE_ARGUMENTS)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)
            else:
                return


async def _restart_with_other_data(mesh: Mesh, folder: Path, *, keep_as: Path, data: Path | None = None) -> None:
    """The controller is started with other data, or with none."""
    await mesh.kill("controller")
    folder.rename(keep_as)
    if data is None:
        folder.mkdir()
    else:
        data.rename(folder)
    await mesh.start_again("controller")


async def _until_metrics(mesh: Mesh, wanted: dict[str, tuple[str, float]]) -> None:
    """Waits until each of the processes shows a value, or more where it counts."""
    async with asyncio.timeout(LIMIT_SECONDS):
        for name, (metric, value) in wanted.items():
            while True:
                shown = (await scrape(mesh.services[name].admin_address)).get(metric, 0)
                if shown == value or (metric == IGNORED and shown > value):
                    break
                await asyncio.sleep(0.1)


async def _until_indexes_are_exact(mesh: Mesh, workers: int) -> None:
    """Router and KV master know all of what so many workers hold, and of nobody else."""
    router, kvmaster = mesh.services["router"].address, mesh.services["kvmaster"].address
    async with open_channel(router) as to_router, open_channel(kvmaster) as to_kvmaster:
        stubs = RouterServiceStub(to_router), KvMasterServiceStub(to_kvmaster)
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                seen = await mesh.sources(*stubs)
                if all([SOURCE_STATE_EXACT] * workers == [source.state for source in of] for of in seen.values()):
                    return
                await asyncio.sleep(0.1)
