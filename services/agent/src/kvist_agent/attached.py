"""Engines that Kvist did not start: the core reads what they publish and keeps their ledgers."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvist import _core
from kvist.agent.v1.agent_pb2 import AttachedEngine, WatchKvEventsRequest, WatchKvEventsResponse
from kvist.errors import NotFoundError, core_errors, error
from kvist.events.v1.events_pb2 import LedgerDigest
from kvist.telemetry import logger
from kvist_agent.attach_settings import AttachSettings
from kvist_agent.attached_metrics import AttachedCollector

ATTACHED_THREADS = 1

_log = logger(__name__)


class AttachedEngines:
    """The attached engines of a node. Their ledgers begin once the cluster's hash seed is known."""

    def __init__(
        self, settings: Sequence[AttachSettings], *, folder: Path, node_uid: str, registry: CollectorRegistry
    ) -> None:
        self._settings = {attached_uid(engine.name, node_uid=node_uid): engine for engine in settings}
        self._folder = folder
        self._registry = registry
        self._hash_seed: int | None = None
        self._hash_seed_known = asyncio.Event()
        self._started: asyncio.Future[_core.AttachedEngines] | None = None
        self._core: _core.AttachedEngines | None = None

    def enter_cluster(self, hash_seed: int) -> None:
        """States the seed of the cluster's block hashes. Another one than before needs a restart of the agent."""
        if self._hash_seed is None:
            self._hash_seed = hash_seed
            self._hash_seed_known.set()
        elif self._hash_seed != hash_seed and self._settings:
            _log.error("hash_seed_changed", hint="restart the agent")

    async def run(self) -> None:
        """Keeps the ledgers until cancelled."""
        if not self._settings:
            return
        await self._hash_seed_known.wait()
        runtime = _core.Runtime(ATTACHED_THREADS)
        try:
            with core_errors():
                core = _core.AttachedEngines(runtime, json.dumps(self._core_settings()))
                await asyncio.to_thread(core.start)
            numbers = AttachedCollector(core)
            self._registry.register(numbers)
            self._core = core
            self._future().set_result(core)
            _log.info("engines_attached", engines=[engine.name for engine in self._settings.values()])
            try:
                await asyncio.Event().wait()
            finally:
                self._core = None
                self._registry.unregister(numbers)
                with contextlib.suppress(_core.CoreError):
                    core.stop()
        finally:
            runtime.close()

    async def core(self) -> _core.AttachedEngines | None:
        """What the relay reads, once there is something; none when no engine is attached."""
        return await asyncio.shield(self._future()) if self._settings else None

    def descriptions(self) -> list[AttachedEngine]:
        """The engines that were reached, for the controller."""
        if self._core is None:
            return []
        return [AttachedEngine.FromString(encoded) for encoded in self._core.descriptions()]

    def uids(self) -> list[str]:
        """UIDs of all of them."""
        return sorted(self._settings)

    def digests(self, worker_uid: str) -> list[LedgerDigest]:
        """What an engine's ledgers state now; nothing before they have begun."""
        digests = self._core.digests(worker_uid) if self._core is not None else None
        return [LedgerDigest.FromString(encoded) for encoded in digests or []]

    async def watch(self, request: WatchKvEventsRequest) -> AsyncIterator[WatchKvEventsResponse]:
        """The history of an engine's ledgers.

        Raises:
            KvistError: NOT_FOUND, or why the history ended.
        """
        if request.worker_uid not in self._settings or self._core is None:
            raise NotFoundError("this agent has attached no such engine")
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[bytes | str | None] = asyncio.Queue()

        def on_part(part: bytes | str | None) -> None:
            loop.call_soon_threadsafe(parts.put_nowait, part)

        with core_errors():
            stream = self._core.watch(request.SerializeToString(), on_part)
        try:
            while (part := await parts.get()) is not None:
                if isinstance(part, str):
                    raise error(part, "the history has ended; ask anew")
                yield WatchKvEventsResponse.FromString(part)
                stream.taken()
        finally:
            stream.close()

    def _future(self) -> "asyncio.Future[_core.AttachedEngines]":
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
        return self._started

    def _core_settings(self) -> dict[str, object]:
        return {
            "hash_seed": self._hash_seed,
            "folder": str(self._folder),
            "engines": [core_settings(engine, worker_uid=uid) for uid, engine in self._settings.items()],
        }


def attached_uid(name: str, *, node_uid: str) -> str:
    """UID under which an engine's ledger speaks: the same after each restart of the agent."""
    return f"attached-{node_uid.removeprefix('node-')}-{name}"


def core_settings(engine: AttachSettings, *, worker_uid: str) -> dict[str, object]:
    """What the core is told of an engine."""
    plain = engine.model_dump(mode="json", exclude={"idle_interval_seconds"})
    return plain | {"worker_uid": worker_uid, "idle_interval_ms": max(1, int(engine.idle_interval_seconds * 1_000))}
