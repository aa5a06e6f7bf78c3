"""One worker slot: its process is started, watched, restarted with back-off, drained and ended.

The slot is one task. Commands set what is wanted; the task compares and acts. The end of the task does not end the
process, so that workers outlive their agent.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from google.protobuf import json_format

from kvist.agent.v1.agent_pb2 import (
    WORKER_PHASE_BACKING_OFF,
    WORKER_PHASE_DRAINING,
    WORKER_PHASE_READY,
    WORKER_PHASE_STARTING,
    WORKER_PHASE_STOPPED,
    WorkerPhase,
    WorkerSpec,
    WorkerStatus,
)
from kvist.engine.v1.engine_pb2 import (
    TRANSFER_FAILURE_POLICY_FAIL,
    TRANSFER_PROTOCOL_RDMA,
    TRANSFER_PROTOCOL_TCP,
    HandOver,
    WorkerDescription,
)
from kvist.errors import KvistError
from kvist.events.v1.events_pb2 import Tombstone
from kvist.telemetry import logger
from kvist_agent.back_off import RestartBackOff
from kvist_agent.process import WorkerProcess, end_left_behind
from kvist_agent.reach import reached_from_elsewhere, reached_here
from kvist_agent.settings import WorkerSettings
from kvist_agent.slot_files import SlotFolder, SlotRecord, write_json

READY_POLL_SECONDS = 0.05
# Between SIGTERM and SIGKILL, after the drain.
TERMINATION_SECONDS = 10.0
DEFAULT_DRAIN_SECONDS = 30.0
DEFAULT_STARTUP_SECONDS = 600.0
_INTENDED = "stopped by the agent"

_T = TypeVar("_T")

_log = logger(__name__)


class WorkerClient(Protocol):
    """What a slot asks its worker."""

    async def describe(self, address: str, *, time_limit_seconds: float = ...) -> WorkerDescription:
        """What the worker is.

        Raises:
            KvistError: It is not up yet, or does not answer in time.
        """
        ...

    async def drain(self, address: str, *, time_limit_seconds: float, fence: int) -> None:
        """Lets running requests end.

        Raises:
            KvistError: It could not be asked.
        """
        ...


@dataclass(frozen=True, slots=True)
class SlotContext:
    """What all slots of a node share.

    Attributes:
        node_uid: UID of the node.
        command: Program and arguments that start the worker of a folder.
        client: Speaks to workers.
        publish_tombstone: Announces a death on the bus.
        changed: Called after each change of a status.
        fence: The highest fence seen.
        settings: Where workers listen and how their lives are watched.
        advertised_host: Host that others reach the node by; empty for that of each worker's own address.
    """

    node_uid: str
    command: Callable[[SlotFolder], Sequence[str]]
    client: WorkerClient
    publish_tombstone: Callable[[Tombstone], Awaitable[None]]
    changed: Callable[[], None]
    fence: Callable[[], int]
    settings: WorkerSettings
    advertised_host: str


class WorkerSlot:
    """A worker slot of this node."""

    def __init__(self, folder: SlotFolder, record: SlotRecord, context: SlotContext) -> None:
        self._folder = folder
        self._record = record
        self._context = context
        self._wanted: WorkerSpec | None = None if record.is_stopping else record.spec
        self._command_given = asyncio.Event()
        self._process: WorkerProcess | None = None
        self._back_off = RestartBackOff()
        self._description: WorkerDescription | None = None
        self._phase: WorkerPhase.ValueType = WORKER_PHASE_STARTING
        self._phase_since_unix_seconds = time.time()
        self._message = ""
        self._restart_at_unix_seconds: float | None = None
        self._dead_incarnation = 0
        self._is_attaching = record.process is not None
        self._ready_at: float | None = None

    @property
    def is_attaching(self) -> bool:
        """Whether it is not known yet how a worker of an earlier agent does."""
        return self._is_attaching

    @property
    def worker_uid(self) -> str:
        """UID of the slot."""
        return self._record.spec.worker_uid

    @property
    def is_stopping(self) -> bool:
        """Whether its end was decided."""
        return self._wanted is None

    @property
    def log_folder(self) -> SlotFolder:
        """Where its log lies."""
        return self._folder

    @property
    def local_address(self) -> str:
        """`host:port` by which this node reaches the worker; empty before it listens."""
        return reached_here(self._record.address) if self._record.address else ""

    def status(self) -> WorkerStatus:
        """What the slot does."""
        status = WorkerStatus(
            spec=self._record.spec,
            phase=self._phase,
            address=self._advertised(self._record.address),
            admin_address=self._advertised(self._record.admin_address),
            process_id=self._record.process.process_id if self._record.process is not None else 0,
            restarts=max(0, self._record.starts - 1),
            message=self._message,
            dead_incarnation=self._dead_incarnation,
        )
        if self._description is not None:
            status.description.CopyFrom(self._description)
        status.phase_since.FromNanoseconds(int(self._phase_since_unix_seconds * 1e9))
        if self._restart_at_unix_seconds is not None:
            status.restart_at.FromNanoseconds(int(self._restart_at_unix_seconds * 1e9))
        return status

    def _advertised(self, address: str) -> str:
        return reached_from_elsewhere(address, advertised_host=self._context.advertised_host) if address else ""

    def want(self, spec: WorkerSpec) -> None:
        """Changes what the slot runs. Time limits change in place; anything else restarts the worker after a drain."""
        if self._wanted is None or self._wanted == spec:
            return
        self._wanted = spec
        self._command_given.set()

    def stop(self) -> None:
        """Drains the worker and ends the slot."""
        if self._wanted is not None:
            self._wanted = None
            self._write(is_stopping=True)
            self._command_given.set()

    async def run(self) -> None:
        """Does what is wanted until the slot has ended."""
        self._folder.make()
        self._folder.write(self._record)
        await self._attach()
        while (spec := self._wanted) is not None:
            if self._process is None and not await self._start(spec):
                continue
            reason, healthy_seconds = await self._live(spec)
            await self._bury(reason)
            if reason != _INTENDED and self._wanted is not None:
                await self._back_off_after(reason, healthy_seconds)
        if self._process is not None:
            await self._end_process()
            await self._bury(_INTENDED)
        self._enter(WORKER_PHASE_STOPPED, message="")
        self._folder.remove()

    async def _attach(self) -> None:
        """Takes over what an earlier agent has started, or announces that it has died meanwhile."""
        if self._record.process is None:
            return
        self._process = WorkerProcess.attach(self._record.process)
        if self._process is None:
            await self._bury("ended while the agent was away")
        else:
            _log.info("worker_attached", worker_uid=self.worker_uid, process_id=self._process.identity.process_id)

    async def _start(self, spec: WorkerSpec) -> bool:
        self._enter(WORKER_PHASE_STARTING, message="")
        self._folder.ready_path.unlink(missing_ok=True)
        settings = worker_settings(spec, incarnation_floor=self._record.incarnation, network=self._context.settings)
        write_json(self._folder.settings_path, settings)
        self._folder.rotate_log()
        try:
            process = WorkerProcess.start(
                self._context.command(self._folder),
                log_path=self._folder.log_path,
                environment=os.environ,
                working_folder=self._folder.path,
            )
        except OSError as error:
            await self._back_off_after(f"could not be started: {error.strerror}", 0.0)
            return False
        self._process = process
        starts = self._record.starts + 1
        self._write(spec=spec, process=process.identity, address="", admin_address="", was_ready=False, starts=starts)
        _log.info("worker_started", worker_uid=self.worker_uid, process_id=process.identity.process_id)
        return True

    async def _live(self, spec: WorkerSpec) -> tuple[str, float]:
        """Follows the process to its end.

        Returns:
            How it ended, and for how many seconds it had been ready.
        """
        process = self._process
        if process is None:
            raise RuntimeError("a slot without a process cannot be followed")
        self._ready_at = None
        async with _task(process.wait()) as death, _task(self._watch_life(spec)) as life:
            while True:
                async with _task(self._command_given.wait()) as command:
                    done, _ = await asyncio.wait({death, life, command}, return_when=asyncio.FIRST_COMPLETED)
                if death in done:
                    return death.result(), self._healthy_seconds()
                if life in done:
                    healthy_seconds = self._healthy_seconds()
                    # A frozen process ends by nothing less.
                    process.signal(signal.SIGKILL)
                    await death
                    return life.result(), healthy_seconds
                if command in done:
                    self._command_given.clear()
                    if self._wanted is not None and _is_same_process(self._wanted, self._record.spec):
                        self._write(spec=self._wanted)
                        self._context.changed()
                        continue
                    async with _task(self._end_process()) as ending:
                        await asyncio.wait({ending, life}, return_when=asyncio.FIRST_COMPLETED)
                        if not ending.done():
                            # A frozen worker would use up the whole time of its drain.
                            process.signal(signal.SIGKILL)
                        await ending
                    await death
                    return _INTENDED, 0.0

    def _healthy_seconds(self) -> float:
        return 0.0 if self._ready_at is None else time.monotonic() - self._ready_at

    async def _watch_life(self, spec: WorkerSpec) -> str:
        """Waits until the worker is ready, then asks it again and again; returns what went wrong."""
        problem = await self._become_ready(spec)
        if problem:
            return problem
        self._ready_at = time.monotonic()
        settings = self._context.settings
        failures = 0
        while failures < settings.liveness_failures:
            await asyncio.sleep(settings.liveness_interval_seconds)
            try:
                await self._context.client.describe(
                    self.local_address, time_limit_seconds=settings.liveness_time_limit_seconds
                )
            except KvistError as error:
                failures += 1
                _log.warning("worker_silent", worker_uid=self.worker_uid, failures=failures, error_code=error.code)
            else:
                failures = 0
        return f"did not answer {failures} times in a row"

    async def _become_ready(self, spec: WorkerSpec) -> str:
        """Waits until the worker describes itself; returns what went wrong, or nothing."""
        limit = spec.startup_time_limit.ToNanoseconds() / 1e9 or DEFAULT_STARTUP_SECONDS
        if self._record.was_ready:
            # It served an earlier agent, so it has nothing to load: one that is silent is frozen.
            limit = self._context.settings.liveness_limit_seconds
        try:
            async with asyncio.timeout(limit):
                if not self._record.address:
                    await self._listen()
                while True:
                    try:
                        description = await self._context.client.describe(self.local_address)
                        break
                    except KvistError:
                        # Not up yet; the process's death and the time limit end the waiting.
                        await asyncio.sleep(READY_POLL_SECONDS)
        except TimeoutError:
            return f"was not ready after {limit:.0f} s"
        self._description = description
        self._write(incarnation=max(description.incarnation, self._record.incarnation), was_ready=True)
        self._enter(WORKER_PHASE_READY, message="")
        _log.info("worker_ready", worker_uid=self.worker_uid, incarnation=description.incarnation)
        return ""

    async def _listen(self) -> None:
        while True:
            try:
                addresses = json.loads(self._folder.ready_path.read_text())
                break
            except (FileNotFoundError, json.JSONDecodeError):
                await asyncio.sleep(READY_POLL_SECONDS)
        self._write(
            address=str(addresses["grpc_address"]),
            admin_address=str(addresses.get("admin_address", "")),
            # Known before the worker is ready, so that a death while loading closes the right incarnation.
            incarnation=max(int(addresses.get("incarnation", 0)), self._record.incarnation),
        )
        self._context.changed()

    async def _end_process(self) -> None:
        """Drains, then asks, then forces."""
        process = self._process
        if process is None:
            return
        spec = self._record.spec
        self._enter(WORKER_PHASE_DRAINING, message="")
        if self._description is not None:
            limit = spec.drain_time_limit.ToNanoseconds() / 1e9 if spec.HasField("drain_time_limit") else None
            try:
                await self._context.client.drain(
                    self.local_address,
                    time_limit_seconds=DEFAULT_DRAIN_SECONDS if limit is None else limit,
                    fence=self._context.fence(),
                )
            except KvistError as error:
                _log.warning("worker_drain_failed", worker_uid=self.worker_uid, error_code=error.code)
        process.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(TERMINATION_SECONDS):
                await process.wait()
        except TimeoutError:
            process.signal(signal.SIGKILL)
            await process.wait()

    async def _bury(self, reason: str) -> None:
        """Announces a death at once: the controller by status, everybody else by tombstone."""
        incarnation = self._record.incarnation
        left = 0 if self._record.process is None else await asyncio.to_thread(end_left_behind, self._record.process)
        if left:
            _log.warning("worker_left_processes_behind", worker_uid=self.worker_uid, processes=left)
        self._process = None
        self._description = None
        self._dead_incarnation = incarnation
        self._write(process=None, address="", admin_address="", was_ready=False)
        if reason != _INTENDED:
            _log.warning("worker_died", worker_uid=self.worker_uid, incarnation=incarnation, reason=reason)
        # Not STOPPED yet: that is said once, at the slot's end.
        self._enter(WORKER_PHASE_BACKING_OFF, message=reason)
        tombstone = Tombstone(
            worker_uid=self.worker_uid, incarnation=incarnation, node_uid=self._context.node_uid, reason=reason
        )
        tombstone.observed_at.GetCurrentTime()
        await self._context.publish_tombstone(tombstone)

    async def _back_off_after(self, reason: str, healthy_seconds: float) -> None:
        delay_seconds = self._back_off.next_delay_seconds(healthy_seconds=healthy_seconds)
        self._restart_at_unix_seconds = time.time() + delay_seconds
        self._enter(WORKER_PHASE_BACKING_OFF, message=await self._explained(reason))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_seconds):
                # A new specification or the end of the slot cuts the wait short.
                await self._command_given.wait()
        self._command_given.clear()
        self._restart_at_unix_seconds = None

    async def _explained(self, reason: str) -> str:
        """How the process ended, and what it said of it."""
        failure = await asyncio.to_thread(self._folder.failure)
        return f"{reason}: {failure}" if failure else reason

    def _enter(self, phase: "WorkerPhase.ValueType", *, message: str) -> None:
        self._is_attaching = False
        if phase != self._phase:
            self._phase_since_unix_seconds = time.time()
        self._phase = phase
        self._message = message
        self._context.changed()

    def _write(self, **changes: Any) -> None:
        self._record = replace(self._record, **changes)
        self._folder.write(self._record)


def worker_settings(spec: WorkerSpec, *, incarnation_floor: int, network: WorkerSettings) -> dict[str, Any]:
    """What a worker is started with."""
    # Only where there is one: a worker of an older environment knows no such setting.
    hand_over = {"hand_over": _hand_over_settings(spec.hand_over)} if spec.HasField("hand_over") else {}
    return {
        "worker_uid": spec.worker_uid,
        "model": spec.model,
        "namespace": spec.model,
        "pool_uid": spec.pool_uid,
        "pool_revision": spec.pool_revision,
        "role": int(spec.role),
        "hash_seed": spec.hash_seed,
        "incarnation_floor": incarnation_floor,
        "grpc_listen": network.listen,
        "admin_listen": network.listen,
        "insecure": network.insecure,
        **network.core_door(),
        "drain_time_limit_ms": spec.drain_time_limit.ToMilliseconds() or int(DEFAULT_DRAIN_SECONDS * 1000),
        "engine": spec.engine,
        "engine_arguments": json_format.MessageToDict(spec.engine_arguments),
        **hand_over,
    }


def _hand_over_settings(hand_over: HandOver) -> dict[str, Any]:
    """How KV is handed over, as a worker's settings say it."""
    return {
        "connector": hand_over.connector,
        "protocol": {TRANSFER_PROTOCOL_RDMA: "rdma", TRANSFER_PROTOCOL_TCP: "tcp"}.get(hand_over.protocol),
        "shared_folder": hand_over.shared_folder,
        "rdma_device": hand_over.rdma_device,
        "lease_ms": hand_over.lease_duration.ToMilliseconds(),
        "on_failure": "fail" if hand_over.on_failure == TRANSFER_FAILURE_POLICY_FAIL else "recompute",
    }


def _is_same_process(wanted: WorkerSpec, running: WorkerSpec) -> bool:
    """Whether a process that was started for one specification also serves another."""
    return _without_limits(wanted) == _without_limits(running)


def _without_limits(spec: WorkerSpec) -> WorkerSpec:
    copy = WorkerSpec()
    copy.CopyFrom(spec)
    copy.ClearField("drain_time_limit")
    copy.ClearField("startup_time_limit")
    return copy


@contextlib.asynccontextmanager
async def _task(work: Coroutine[Any, Any, _T]) -> AsyncIterator[asyncio.Task[_T]]:
    """A task that ends with the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
