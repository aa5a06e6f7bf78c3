"""The gRPC face of the agent."""
# ruff: noqa: ARG002, N802  Generated signatures.

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import grpc

from kvist.agent.v1 import agent_pb2 as pb
from kvist.agent.v1.agent_pb2_grpc import AgentServiceServicer
from kvist.errors import KvistError, UnsupportedError, invalid_field
from kvist_agent.attached import AttachedEngines
from kvist_agent.inventory import read_load
from kvist_agent.slots import WorkerSlots
from kvist_agent.worker_client import GrpcWorkerClient

DEFAULT_TAIL_BYTES = 64 * 1024
LOG_CHUNK_BYTES = 64 * 1024
LOG_POLL_SECONDS = 0.2

_T = TypeVar("_T")
_Context = grpc.aio.ServicerContext[Any, Any]


class AgentService(AgentServiceServicer):
    """Serves the slots of this node."""

    def __init__(
        self,
        slots: WorkerSlots,
        *,
        attached: AttachedEngines,
        client: GrpcWorkerClient,
        inventory: pb.NodeInventory,
    ) -> None:
        self._slots = slots
        self._attached = attached
        self._client = client
        self._inventory = inventory

    async def StartWorker(self, request: pb.StartWorkerRequest, context: _Context) -> pb.StartWorkerResponse:
        """Starts a worker slot, or changes its specification."""
        if not request.spec.worker_uid:
            raise invalid_field("spec.worker_uid", "is required")
        self._slots.start(request.spec, fence=request.fence)
        return pb.StartWorkerResponse(worker=self._slots.slot(request.spec.worker_uid).status())

    async def StopWorker(self, request: pb.StopWorkerRequest, context: _Context) -> pb.StopWorkerResponse:
        """Drains and ends a worker slot."""
        self._slots.stop(request.worker_uid, fence=request.fence)
        return pb.StopWorkerResponse()

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: _Context) -> pb.ListWorkersResponse:
        """The worker slots of this node."""
        return pb.ListWorkersResponse(workers=self._slots.statuses())

    async def WatchWorkers(
        self, request: pb.WatchWorkersRequest, context: _Context
    ) -> AsyncIterator[pb.WatchWorkersResponse]:
        """All workers at once, then each change."""
        seen: dict[str, pb.WorkerStatus] | None = None
        while True:
            number = self._slots.changes.number
            present = {status.spec.worker_uid: status for status in self._slots.statuses()}
            known = seen or {}
            changed = [status for uid, status in present.items() if known.get(uid) != status]
            removed = sorted(known.keys() - present.keys())
            if seen is None or changed or removed:
                yield pb.WatchWorkersResponse(workers=changed, removed_worker_uids=removed)
            seen = present
            await self._slots.changes.after(number)

    async def ReadWorkerLog(
        self, request: pb.ReadWorkerLogRequest, context: _Context
    ) -> AsyncIterator[pb.ReadWorkerLogResponse]:
        """The end of a worker's log, then, with `follow`, what is added."""
        path = self._slots.slot(request.worker_uid).log_folder.log_path
        position = max(0, _size(path) - (request.tail_bytes or DEFAULT_TAIL_BYTES))
        while True:
            # A shorter file is the log of a new start.
            position = position if position <= _size(path) else 0
            data = await asyncio.to_thread(_read, path, position)
            if data:
                position += len(data)
                yield pb.ReadWorkerLogResponse(data=data)
            elif request.follow:
                await asyncio.sleep(LOG_POLL_SECONDS)
            else:
                return

    async def WatchKvEvents(
        self, request: pb.WatchKvEventsRequest, context: _Context
    ) -> AsyncIterator[pb.WatchKvEventsResponse]:
        """Ledgers of attached engines."""
        async for response in self._attached.watch(request):
            yield response

    async def Audit(self, request: pb.AuditRequest, context: _Context) -> pb.AuditResponse:
        """Digests of this node's ledgers as they state them now."""
        wanted = set(request.worker_uids)
        statuses = [status for status in self._slots.statuses() if not wanted or status.spec.worker_uid in wanted]
        attached = [uid for uid in self._attached.uids() if not wanted or uid in wanted]
        known = {status.spec.worker_uid for status in statuses} | set(attached)
        response = pb.AuditResponse(silent_worker_uids=sorted(wanted - known))
        for uid in attached:
            digests = self._attached.digests(uid)
            response.digests.extend(digests)
            if not digests:
                response.silent_worker_uids.append(uid)

        async def ask(status: pb.WorkerStatus) -> None:
            address = self._slots.slot(status.spec.worker_uid).local_address
            try:
                digests = await self._client.digests(address, ranks=status.description.ranks)
                response.digests.extend(digests)
            except KvistError:
                response.silent_worker_uids.append(status.spec.worker_uid)

        async with asyncio.TaskGroup() as group:
            for status in statuses:
                if status.address:
                    group.create_task(ask(status))
                else:
                    response.silent_worker_uids.append(status.spec.worker_uid)
        return response

    async def GetNode(self, request: pb.GetNodeRequest, context: _Context) -> pb.GetNodeResponse:
        """What the node is and how loaded it is."""
        return pb.GetNodeResponse(inventory=self._inventory, load=read_load())

    async def FetchArtifact(
        self, request: pb.FetchArtifactRequest, context: _Context
    ) -> AsyncIterator[pb.FetchArtifactResponse]:
        """Artifacts."""
        async for response in _unsupported(pb.FetchArtifactResponse, "artifacts are not supported yet"):
            yield response


async def _unsupported(response: type[_T], reason: str) -> AsyncIterator[_T]:
    """A stream that is refused at once."""
    for _ in ():
        yield response()
    raise UnsupportedError(reason)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _read(path: Path, position: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(position)
            return file.read(LOG_CHUNK_BYTES)
    except FileNotFoundError:
        return b""
