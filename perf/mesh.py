"""The mesh that a benchmark measures: NATS, simulated workers, their KV events, one router; each a process."""

import asyncio
import contextlib
import itertools
import json
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from kvist.controller.v1.controller_pb2 import ClusterState, ClusterVersion, Model, Pool, WorkerEntry
from kvist.router.v1.router_pb2 import Target
from perf.placement import Placement
from perf.processes import Process

CLUSTER = "bench"
HASH_SEED = 7
BLOCK_SIZE_TOKENS = 16
READY_TIME_LIMIT_SECONDS = 30.0
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Mesh:
    """A running mesh.

    Attributes:
        router: The router's process.
        workers: The workers of each model.
        others: All other processes.
        http_address: `host:port` of the HTTP edge.
        admin_address: `host:port` of the router's metrics.
        worker_address: `host:port` of one of the workers.
    """

    router: Process
    workers: Mapping[str, tuple[Process, ...]]
    others: tuple[Process, ...]
    http_address: str
    admin_address: str
    worker_address: str

    def check(self) -> None:
        """Sees to it that everything still runs."""
        for process in (self.router, *itertools.chain.from_iterable(self.workers.values()), *self.others):
            process.check()


@contextlib.asynccontextmanager
async def running_mesh(
    models: Mapping[str, Mapping[str, Any]],
    *,
    folder: Path,
    cores: Placement,
    replicas: int = 1,
    upstreams: Sequence[Mapping[str, Any]] = (),
) -> AsyncIterator[Mesh]:
    """Runs a mesh as it is in production: the router's index is fed over NATS, and its log is written.

    Args:
        models: Arguments of the simulated engine for each model.
        folder: Where logs and ready files go.
        cores: Which cores run what. Whoever calls has to keep to its own.
        replicas: Workers of each model.
        upstreams: Servers outside the mesh, as the router's setting has them.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def start(process: Process) -> dict[str, Any]:
            stack.push_async_callback(process.stop)
            return await process.start()

        nats = _nats(folder)
        nats_url = (await start(nats))["nats"][0]
        workers: dict[str, tuple[Process, ...]] = {}
        addresses: dict[str, list[dict[str, Any]]] = {}
        for model, arguments in models.items():
            workers[model] = tuple(_worker(model, number, arguments, folder) for number in range(replicas))
            addresses[model] = [await start(worker) for worker in workers[model]]
        relay = _relay(addresses, nats_url, folder)
        await start(relay)
        state_path = folder / "cluster-state.json"
        state_path.write_text(json_format.MessageToJson(_cluster_state(addresses)))
        config_path = folder / "router.yaml"
        # JSON is YAML.
        config_path.write_text(json.dumps({"upstreams": list(upstreams)}))
        router = _router(state_path, config_path, nats_url, folder, cores)
        announced = await start(router)
        worker_address = next(found["grpc_address"] for _, _, found in _each(addresses))
        edge, admin = announced["http_address"], announced["admin_address"]
        mesh = Mesh(router, workers, (nats, relay), edge, admin, worker_address)
        await _until_ready(mesh, exact_sources=len(models) * replicas)
        yield mesh


def _nats(folder: Path) -> Process:
    binary = str(Path(sys.executable).with_name("nats-server"))
    return Process(
        "nats",
        [binary, "--addr=127.0.0.1", "--port=-1", f"--ports_file_dir={folder}"],
        folder=folder,
        ready_path=lambda process_id: folder / f"nats-server_{process_id}.ports",
    )


def _worker(model: str, number: int, arguments: Mapping[str, Any], folder: Path) -> Process:
    uid = f"{model}-{number}"
    settings_path = folder / f"{uid}.settings.json"
    settings = {
        "worker_uid": uid,
        "model": model,
        "namespace": model,
        "pool_uid": model,
        "pool_revision": "1",
        "hash_seed": HASH_SEED,
        "engine": "sim",
        "engine_arguments": {"block_size_tokens": BLOCK_SIZE_TOKENS, **arguments},
    }
    settings_path.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "kvist_worker", "--settings-file", str(settings_path), "--ready-file", "{ready}"]
    return Process(f"worker-{uid}", command, folder=folder)


def _relay(addresses: Mapping[str, Sequence[Mapping[str, Any]]], nats_url: str, folder: Path) -> Process:
    settings = json.dumps({"nats_url": nats_url, "cluster": CLUSTER, "client_name": "bench-relay"})
    workers = json.dumps([{"uid": uid, "address": found["grpc_address"]} for _, uid, found in _each(addresses)])
    return Process("relay", [sys.executable, "-m", "perf.relay_process", settings, workers, "{ready}"], folder=folder)


def _router(state_path: Path, config_path: Path, nats_url: str, folder: Path, cores: Placement) -> Process:
    command = [sys.executable, "-m", "kvist_router", "--config", str(config_path), "--ready-file", "{ready}"]
    for setting in (f"cluster_state_file={state_path}", f"bus.urls={nats_url}", "drain_seconds=1"):
        command += ["--set", setting]
    return Process("router", command, folder=folder, cores=cores.router)


def _each(addresses: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Model, UID and announcement of each worker."""
    for model, announced in addresses.items():
        for number, found in enumerate(announced):
            yield model, f"{model}-{number}", found


def _cluster_state(addresses: Mapping[str, Sequence[Mapping[str, Any]]]) -> ClusterState:
    return ClusterState(
        version=ClusterVersion(store_epoch=1, revision=1),
        cluster=CLUSTER,
        hash_seed=HASH_SEED,
        models=[
            Model(name=model, uid=model, pools=[Pool(uid=model, revision="1", replicas=len(announced))])
            for model, announced in addresses.items()
        ],
        workers=[
            WorkerEntry(
                target=Target(worker_uid=uid, address=found["grpc_address"], pool_uid=model, pool_revision="1"),
                model=model,
                namespace=model,
                incarnation=int(found["incarnation"]),
                ranks=1,
                block_size_tokens=BLOCK_SIZE_TOKENS,
            )
            for model, uid, found in _each(addresses)
        ],
    )


async def router_metrics(mesh: Mesh) -> str:
    """What the router says of itself, as text."""
    return await asyncio.to_thread(_read, f"http://{mesh.admin_address}/metrics")


async def _until_ready(mesh: Mesh, *, exact_sources: int) -> None:
    """Waits until the router would answer and its index knows every cache exactly."""
    async with asyncio.timeout(READY_TIME_LIMIT_SECONDS):
        while True:
            mesh.check()
            metrics = await router_metrics(mesh)
            ready = value_of(metrics, "kvist_router_targets", 'state="ready"')
            exact = value_of(metrics, "kvist_index_sources", 'state="exact"')
            if ready >= exact_sources and exact >= exact_sources:
                return
            await asyncio.sleep(POLL_SECONDS)


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310  An address of our own child.
        text: str = response.read().decode()
        return text


def value_of(metrics: str, name: str, label: str = "") -> float:
    """The value of one metric, with one label where it has any; 0 when there is none."""
    for line in metrics.splitlines():
        if line.startswith((f"{name} ", f"{name}{{")) and label in line:
            return float(line.rsplit(" ", 1)[1])
    return 0.0
