"""All worker slots of the node: what is wanted of them, what they do, and who is told."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Self

from kvist.agent.v1.agent_pb2 import WorkerSpec, WorkerStatus
from kvist.changes import Changes
from kvist.errors import InvalidRequestError, NotFoundError, PreconditionError, invalid_field
from kvist.events.v1.events_pb2 import Tombstone
from kvist.telemetry import logger
from kvist_agent.settings import WorkerSettings
from kvist_agent.slot import SlotContext, WorkerClient, WorkerSlot
from kvist_agent.slot_files import SessionRecord, SlotFolder, SlotRecord, StateFolder

_log = logger(__name__)


class WorkerSlots:
    """Runs worker slots. Leaving the context leaves the workers alone: they outlive their agent."""

    def __init__(
        self,
        folder: StateFolder,
        *,
        node_uid: str,
        command: Callable[[SlotFolder], list[str]],
        client: WorkerClient,
        publish_tombstone: Callable[[Tombstone], Awaitable[None]],
        settings: WorkerSettings | None = None,
        advertised_host: str = "",
    ) -> None:
        self.changes = Changes()
        self._folder = folder
        self._slots: dict[str, WorkerSlot] = {}
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        # Specifications of slots that are asked for while a slot of the same UID still ends.
        self._waiting: dict[str, WorkerSpec] = {}
        self._fence = folder.read_session().fence
        self._context = SlotContext(
            node_uid=node_uid,
            command=command,
            client=client,
            publish_tombstone=publish_tombstone,
            changed=self.changes.announce,
            fence=lambda: self._fence,
            settings=settings or WorkerSettings(),
            advertised_host=advertised_host,
        )

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        for folder in self._folder.slots():
            record = folder.read()
            if record is None:
                _log.warning("slot_record_unreadable", folder=folder.path.name)
                continue
            self._run(folder, record)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(kind, value, traceback)

    async def attached(self, *, time_limit_seconds: float) -> None:
        """Waits until it is known how the workers of an earlier agent do, or the time is over.

        To say before that they are starting would take them away from routers for a moment.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(time_limit_seconds):
                while any(slot.is_attaching for slot in self._slots.values()):
                    await self.changes.after(self.changes.number)

    def statuses(self) -> list[WorkerStatus]:
        """What all slots do, by UID."""
        return [self._slots[uid].status() for uid in sorted(self._slots)]

    def slot(self, worker_uid: str) -> WorkerSlot:
        """One slot.

        Raises:
            NotFoundError: There is none.
        """
        try:
            return self._slots[worker_uid]
        except KeyError:
            raise NotFoundError(f"this node has no worker {worker_uid!r}") from None

    def check_fence(self, fence: int) -> None:
        """Remembers the fence of a leader.

        Raises:
            PreconditionError: STALE_FENCE, when a higher one was seen.
        """
        if not self._folder.accept_fence(fence):
            raise PreconditionError(f"a leader with fence {self._fence} has taken over", code="STALE_FENCE")
        self._fence = max(self._fence, fence)

    def enter_cluster(self, cluster: str, *, hash_seed: int) -> None:
        """Remembers the terms of a session. Another hash seed is another cluster, whose fences begin anew."""
        stored = self._folder.read_session()
        if stored.hash_seed != hash_seed:
            self._fence = 0
        entered = SessionRecord(cluster=cluster, hash_seed=hash_seed, fence=self._fence)
        if entered != stored:
            self._folder.write_session(entered)

    def assign(self, specs: Iterable[WorkerSpec], *, fence: int) -> None:
        """Makes these the slots of the node; others are drained and ended.

        Raises:
            PreconditionError: STALE_FENCE, when a higher fence was seen.
        """
        self.check_fence(fence)
        wanted = {spec.worker_uid: spec for spec in specs}
        for uid in self._slots.keys() - wanted.keys():
            self._slots[uid].stop()
        for uid in self._waiting.keys() - wanted.keys():
            del self._waiting[uid]
        for spec in wanted.values():
            try:
                self.start(spec, fence=fence)
            except InvalidRequestError as failure:
                _log.error("slot_refused", reason=failure.message)

    def start(self, spec: WorkerSpec, *, fence: int) -> None:
        """Starts a slot, or changes what it runs. Idempotent for an equal specification.

        Raises:
            KvistError: The UID cannot be that of a slot, or a higher fence was seen.
        """
        self.check_fence(fence)
        uid = spec.worker_uid
        present = self._slots.get(uid)
        if present is not None:
            if present.is_stopping:
                self._waiting[uid] = spec
            else:
                present.want(spec)
            return
        try:
            folder = self._folder.slot(uid)
        except ValueError as error:
            raise invalid_field("spec.worker_uid", str(error)) from error
        self._run(folder, SlotRecord(spec=spec))

    def stop(self, worker_uid: str, *, fence: int) -> None:
        """Drains and ends a slot. Idempotent.

        Raises:
            PreconditionError: STALE_FENCE, when a higher fence was seen.
        """
        self.check_fence(fence)
        self._waiting.pop(worker_uid, None)
        slot = self._slots.get(worker_uid)
        if slot is not None:
            slot.stop()

    async def stop_all(self) -> None:
        """Drains and ends all slots, and waits for it."""
        self._waiting.clear()
        for slot in self._slots.values():
            slot.stop()
        while self._slots:
            await self.changes.after(self.changes.number)

    def _run(self, folder: SlotFolder, record: SlotRecord) -> None:
        slot = WorkerSlot(folder, record, self._context)
        self._slots[slot.worker_uid] = slot
        task = self._group.create_task(self._follow(slot), name=f"slot-{slot.worker_uid}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.changes.announce()

    async def _follow(self, slot: WorkerSlot) -> None:
        await slot.run()
        uid = slot.worker_uid
        del self._slots[uid]
        self.changes.announce()
        spec = self._waiting.pop(uid, None)
        if spec is not None:
            self._run(self._folder.slot(uid), SlotRecord(spec=spec))
