"""Parts of the mesh fail, one after another, while streaming requests run: each request has exactly one outcome.

Real processes on loopback: three etcd members, NATS, two controllers, two KV masters, two routers, two agents, four
simulated workers, and links that a toxiproxy makes ill. Limits in seconds are those of docs/reference/failover.md on a
machine that has nothing else to do; on a busy one they grow as the share that others leave shrinks. With
`KVIST_CHAOS_OUTAGE_SECONDS` all faults are tried, and outages of the store and the bus last so long; without it the
shorter ones. `KVIST_FAILOVER_RESULTS` names a file for the measured times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from support.control_mesh import CONTROLLER_KEY, KVMASTER_KEY, ROUTERS, ControlMesh, control_mesh
from support.engine_record import check_outcomes, read_engine_records
from support.failover import LIMIT_SECONDS, MODEL, Form, Scene
from support.failover_results import write_results
from support.faults import controllers, etcd_links, processes, stores, worker_links
from support.scrape import scrape
from support.steady_load import SteadyLoad

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1_800)]

WORKERS = 4
CLIENTS = 6

Fault = Callable[[Scene], Awaitable[None]]

# No request fails: nothing on its way is touched.
CONTROL_PLANE_FAULTS: tuple[Fault, ...] = (
    controllers.leader_is_killed,
    controllers.leader_is_paused,
    controllers.leader_cannot_be_reached,
    controllers.clock_jumps,
    controllers.history_is_cut_while_a_standby_is_away,
    stores.kvmaster_leader_is_killed,
    stores.kvmaster_leader_is_frozen,
    stores.etcd_leader_is_killed,
    stores.etcd_leader_is_frozen,
    stores.etcd_is_away,
    etcd_links.way_to_etcd_is_slow,
    etcd_links.etcd_members_are_far_apart,
    etcd_links.etcd_leader_is_cut_off_from_the_others,
    etcd_links.leading_controller_reaches_only_a_cut_off_member,
    etcd_links.leading_controller_is_refused_by_etcd,
    stores.nats_is_away,
    stores.nats_cannot_be_reached,
    processes.agent_is_killed,
    # Of a router with clients of its own.
    worker_links.worker_links_are_slow,
    worker_links.worker_link_is_black_holed,
)
# What was on its way there is concerned. Clients try once more when a router breaks off.
SERVING_FAULTS: tuple[Fault, ...] = (
    processes.worker_is_killed_before_its_first_token,
    processes.worker_is_killed_after_its_first_token,
    processes.worker_is_frozen,
    processes.router_is_killed,
    controllers.routers_start_without_controllers,
)
SHORT: frozenset[Fault] = frozenset(
    {
        controllers.leader_is_killed,
        stores.kvmaster_leader_is_frozen,
        stores.etcd_leader_is_killed,
        stores.etcd_is_away,
        etcd_links.way_to_etcd_is_slow,
        etcd_links.etcd_members_are_far_apart,
        etcd_links.etcd_leader_is_cut_off_from_the_others,
        etcd_links.leading_controller_reaches_only_a_cut_off_member,
        worker_links.worker_links_are_slow,
        worker_links.worker_link_is_black_holed,
        processes.worker_is_killed_before_its_first_token,
        processes.worker_is_killed_after_its_first_token,
        processes.router_is_killed,
        controllers.routers_start_without_controllers,
    }
)


async def test_each_request_has_one_outcome_whatever_fails(tmp_path: Path) -> None:
    form = Form.of_environment()
    async with control_mesh(tmp_path, controller_lease_seconds=form.controller_lease_seconds) as mesh:
        await mesh.change(replicas=WORKERS)
        await mesh.until_workers(WORKERS)
        for edge in mesh.edges():
            await controllers.until_served(edge)
        load = SteadyLoad(mesh.edges, MODEL, clients=CLIENTS)
        scene = Scene(mesh, load, form, workers=WORKERS)
        async with load.running():
            await _run(scene, CONTROL_PLANE_FAULTS)
            assert [] == load.bad()
            load.most_attempts = 2
            await _run(scene, SERVING_FAULTS)
        await _check_that_nothing_is_left(scene)
        _check_claims(mesh)
        # Requests of the steady load alone: others ask now and then whether somebody serves.
        records = read_engine_records(mesh.record_folder, routers=mesh.routers)
        asked = [record for record in records if record.request_id.startswith(load.prefix)]
        check_outcomes(load.outcomes, asked, killed_engines=scene.killed_engines)
        # Those whose text had begun at an engine that was killed, and no others.
        begun = [outcome for outcome in load.bad() if outcome.kind == "failed" and outcome.attempts[-1].text_at]
        assert begun == load.bad()
    write_results(scene)


async def _run(scene: Scene, faults: Sequence[Fault]) -> None:
    for fault in faults:
        if scene.form.is_full or fault in SHORT:
            print(f"-- {fault.__name__} {time.strftime('%H:%M:%S')}", flush=True)
            await fault(scene)


async def _check_that_nothing_is_left(scene: Scene) -> None:
    """No reservation, stream or request of anybody."""
    async with scene.step("after the last request: no reservation, no stream", limit_seconds=5) as step:
        step.begin()
        left: dict[str, float] = {"unknown": 1}
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                while left:
                    left = await _left(scene.mesh)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(left) from None
        step.end()


async def _left(mesh: ControlMesh) -> dict[str, float]:
    of_routers = ("kvist_router_reservations", "kvist_router_promised_tokens", "kvist_router_active_requests")
    of_workers = ("kvist_worker_running_requests", "kvist_worker_waiting_requests")
    addresses = {name: (mesh.services[name].admin_address, of_routers) for name in ROUTERS}
    addresses |= {uid: (worker.admin_address, of_workers) for uid, worker in (await mesh.workers()).items()}
    assert len(addresses) == len(ROUTERS) + WORKERS
    left = {}
    for who, (address, names) in addresses.items():
        values = await scrape(address)
        left |= {f"{who} {key}": value for key, value in values.items() if key.split(" ")[0] in names and value != 0}
    return left


def _check_claims(mesh: ControlMesh) -> None:
    """One leader at a time in the store's history: no claim was made while another one lived."""
    for key in (CONTROLLER_KEY, KVMASTER_KEY):
        history = mesh.claims_of(key)
        # A fence is the revision of a claim: none was given twice, and each is higher than those before.
        revisions = [revision for revision, _ in history]
        assert sorted(set(revisions)) == revisions
        is_held = False
        for _, value in history:
            assert is_held != (value is not None), f"two claims at once: {history}"
            is_held = value is not None
