"""The gRPC face of the KV master."""
# ruff: noqa: ARG002, N802  Generated signatures.

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn, Protocol

import grpc

from kvist.errors import UnsupportedError, core_errors, error, invalid_field
from kvist.events.v1.events_pb2 import SourceId
from kvist.kvmaster.v1 import kvmaster_pb2 as pb
from kvist.kvmaster.v1.kvmaster_pb2_grpc import KvMasterServiceServicer
from kvist.router.v1.router_pb2 import SourceStatus

SOURCE_POLL_SECONDS = 0.5

_Context = grpc.aio.ServicerContext[Any, Any]
_SourceKey = tuple[str, int, int]


class Snapshots(Protocol):
    """An answer to `Bootstrap`; `_core.IndexSnapshots` is one."""

    def next_parts(self) -> list[bytes]:
        """The next encoded `BootstrapResponse`s, the end mark last; empty after it."""
        ...


class ClusterIndex(Protocol):
    """What the service asks of the index; `_core.IndexService` is one."""

    def lookup(self, request: bytes) -> bytes:
        """Answers an encoded `LookupRequest`."""
        ...

    def stats(self) -> bytes:
        """An encoded `StatsResponse`."""
        ...

    def bootstrap(self, worker_uids: list[str]) -> Snapshots:
        """Snapshots of the named workers' sources, or of all."""
        ...


class KvMasterService(KvMasterServiceServicer):
    """Answers from the index; a single instance leads."""

    def __init__(self, index: ClusterIndex) -> None:
        self._index = index
        self._is_synced = False

    def set_synced(self) -> None:
        """States that the first cluster state has been applied."""
        self._is_synced = True

    async def Lookup(self, request: pb.LookupRequest, context: _Context) -> pb.LookupResponse:
        """Who holds the beginning of a prompt."""
        match request.WhichOneof("prompt"):
            case None:
                raise invalid_field("prompt", "give blocks or tokens")
            case "tokens":
                if request.block_size_tokens == 0:
                    raise invalid_field("block_size_tokens", "is required with tokens")
                if not request.namespace:
                    raise invalid_field("namespace", "is required with tokens")
        self._require_sync()
        with core_errors():
            # Hashing a long prompt takes milliseconds; the event loop has other callers.
            encoded = await asyncio.to_thread(self._index.lookup, request.SerializeToString())
        response = pb.LookupResponse.FromString(encoded)
        response.answered_by = pb.INSTANCE_ROLE_LEADER
        return response

    async def Bootstrap(self, request: pb.BootstrapRequest, context: _Context) -> AsyncIterator[pb.BootstrapResponse]:
        """Snapshots of all sources, each stating its position, then the end."""
        self._require_sync()
        with core_errors():
            snapshots = self._index.bootstrap(list(request.worker_uids))
            # A reader that is slow holds up this generator, and nothing more is read from the index meanwhile.
            while parts := await asyncio.to_thread(snapshots.next_parts):
                for part in parts:
                    yield pb.BootstrapResponse.FromString(part)

    async def WatchSources(
        self, request: pb.WatchSourcesRequest, context: _Context
    ) -> AsyncIterator[pb.WatchSourcesResponse]:
        """Sources and their states: all at once, then changes, at most a few times a second."""
        self._require_sync()
        seen: dict[_SourceKey, SourceStatus] | None = None
        while True:
            present = {_key(status.source): status for status in (await self._stats()).sources}
            known = seen or {}
            changed = [status for key, status in present.items() if known.get(key) != status]
            removed = [status.source for key, status in known.items() if key not in present]
            if seen is None or changed or removed:
                yield pb.WatchSourcesResponse(sources=changed, removed=removed)
            seen = present
            await asyncio.sleep(SOURCE_POLL_SECONDS)

    async def Stats(self, request: pb.StatsRequest, context: _Context) -> pb.StatsResponse:
        """Sources, counts, digests and memory at this moment."""
        return await self._stats()

    async def PutPrefix(self, request: pb.PutPrefixRequest, context: _Context) -> pb.PutPrefixResponse:
        """Named prefixes."""
        _no_prefixes()

    async def ListPrefixes(self, request: pb.ListPrefixesRequest, context: _Context) -> pb.ListPrefixesResponse:
        """Named prefixes."""
        _no_prefixes()

    async def DeletePrefix(self, request: pb.DeletePrefixRequest, context: _Context) -> pb.DeletePrefixResponse:
        """Named prefixes."""
        _no_prefixes()

    async def _stats(self) -> pb.StatsResponse:
        with core_errors():
            encoded = await asyncio.to_thread(self._index.stats)
        response = pb.StatsResponse.FromString(encoded)
        response.role = pb.INSTANCE_ROLE_LEADER
        return response

    def _require_sync(self) -> None:
        if not self._is_synced:
            raise error("NOT_READY", "the index has not seen the cluster yet", retry_after_seconds=0.5)


def _key(source: SourceId) -> _SourceKey:
    return source.worker_uid, source.rank, source.incarnation


def _no_prefixes() -> NoReturn:
    raise UnsupportedError("named prefixes are not supported yet")
