"""The gRPC face of the KV master."""
# ruff: noqa: ARG002, N802  Generated signatures.

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc

from kvist.errors import UnsupportedError, core_errors, error, invalid_field
from kvist.events.v1.events_pb2 import SourceId
from kvist.kvmaster.v1 import kvmaster_pb2 as pb
from kvist.kvmaster.v1.kvmaster_pb2_grpc import KvMasterServiceServicer
from kvist.router.v1.router_pb2 import SourceStatus
from kvist.store.election import Leadership
from kvist_kvmaster.catalogue import Catalogue
from kvist_kvmaster.standing import Standing

SOURCE_POLL_SECONDS = 0.5
DEFAULT_PAGE_SIZE = 100
LARGEST_PAGE_SIZE = 1_000
# A page ends when it is larger than this, so that an answer stays far below the largest message.
LARGEST_PAGE_BYTES = 4 * 1024 * 1024

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
    """Answers from the index, whether it leads or stands by; the one that leads writes the catalogue."""

    def __init__(self, index: ClusterIndex, standing: Standing) -> None:
        self._index = index
        self._standing = standing
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
        response.answered_by = self._standing.role
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
        """Names a prefix, when this instance leads."""
        catalogue = self._catalogue()
        return pb.PutPrefixResponse(prefix=await catalogue.put(request.prefix, self._leadership()))

    async def ListPrefixes(self, request: pb.ListPrefixesRequest, context: _Context) -> pb.ListPrefixesResponse:
        """Named prefixes by page; the token is the last name of the page before."""
        if request.page_size > LARGEST_PAGE_SIZE:
            raise invalid_field("page_size", f"must be at most {LARGEST_PAGE_SIZE}")
        catalogue = self._catalogue()
        response = pb.ListPrefixesResponse()
        names = [name for name in catalogue.names() if name > request.page_token]
        page_bytes = 0
        for name in names:
            if len(response.prefixes) == (request.page_size or DEFAULT_PAGE_SIZE) or page_bytes > LARGEST_PAGE_BYTES:
                response.next_page_token = response.prefixes[-1].name
                break
            prefix = catalogue.get(name)
            if prefix is not None:
                response.prefixes.append(prefix)
                page_bytes += prefix.ByteSize()
        return response

    async def DeletePrefix(self, request: pb.DeletePrefixRequest, context: _Context) -> pb.DeletePrefixResponse:
        """Forgets a named prefix, when this instance leads."""
        await self._catalogue().delete(request.name, self._leadership())
        return pb.DeletePrefixResponse()

    def _catalogue(self) -> Catalogue:
        if not self._standing.has_store:
            raise UnsupportedError("named prefixes need a state store, and this KV master was given none")
        if self._standing.catalogue is None:
            raise error("NOT_READY", "the state store was not reached yet", retry_after_seconds=0.5)
        return self._standing.catalogue

    def _leadership(self) -> Leadership:
        leadership = self._standing.leadership
        if leadership is None:
            leader = self._standing.leader_name
            message = f"this KV master stands by; {leader or 'nobody'} leads"
            raise error("NOT_READY", message, metadata={"leader": leader}, retry_after_seconds=0.5)
        return leadership

    async def _stats(self) -> pb.StatsResponse:
        with core_errors():
            encoded = await asyncio.to_thread(self._index.stats)
        response = pb.StatsResponse.FromString(encoded)
        response.role = self._standing.role
        response.fence = self._standing.fence
        return response

    def _require_sync(self) -> None:
        if not self._is_synced:
            raise error("NOT_READY", "the index has not seen the cluster yet", retry_after_seconds=0.5)


def _key(source: SourceId) -> _SourceKey:
    return source.worker_uid, source.rank, source.incarnation
