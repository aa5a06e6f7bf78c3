"""The state store of a cluster of machines: etcd 3.5.8 or newer.

Keys lie below a namespace, so that clusters and other programs may share one etcd. The store epoch is a key of its own,
bound to etcd's cluster id. A restored backup may keep that id, so a revision that went backwards is noticed too; who
restores a backup says so with `kvist store declare-restored`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from kvist import telemetry
from kvist.etcd.api import kv_pb2, rpc_pb2
from kvist.etcd.api.rpc_pb2_grpc import KVStub, LeaseStub
from kvist.etcd.endpoints import EtcdEndpoints, EtcdOptions
from kvist.etcd.failures import LEASE_EXISTS
from kvist.etcd.leases import LeaseKeeper
from kvist.etcd.watch import watch
from kvist.store.interface import (
    EPOCH_STEP,
    Batch,
    CompactedError,
    Compare,
    Event,
    EventType,
    KeyValue,
    LeaseGoneError,
    Listing,
    Operation,
    Outcome,
    Put,
    StateStore,
    StoreError,
    StoreRestoredError,
    check_commit,
)

PAGE_KEYS = 500
_EPOCH_KEY = "/kvist/store_epoch"
_LEASE_ID_BITS = 62

_log = telemetry.logger(__name__)


class EtcdStore(StateStore):
    """A state store in etcd."""

    def __init__(self, options: EtcdOptions, *, namespace: str = "") -> None:
        self._endpoints = EtcdEndpoints(options)
        self.endpoints = options.endpoints
        self.namespace = namespace
        self._leases = LeaseKeeper(self._endpoints)
        self._epoch = 0
        # Revision below which no answer to a later request can lie, unless etcd was restored.
        self._floor = 0
        self._closed = asyncio.Event()

    # Life.

    async def __aenter__(self) -> Self:
        try:
            self._epoch = await self._enter_epoch()
        except BaseException:
            await self._endpoints.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()
        await self._leases.close()
        await self._endpoints.__aexit__(kind, value, traceback)

    @property
    def epoch(self) -> int:
        """Microseconds of the Unix time when etcd was first used, was replaced by another one, or went backwards."""
        return self._epoch

    async def declare_restored(self) -> int:
        """Starts a new epoch, after etcd was restored from a backup; returns it."""
        while True:
            found, cluster_id = await self._read_epoch()
            epoch = max(_unix_microseconds(), (json.loads(found.value)["epoch"] if found else 0) + EPOCH_STEP)
            if await self._write_epoch(epoch, cluster_id, seen=found):
                self._epoch = epoch
                return epoch

    async def _enter_epoch_of_restored(self) -> None:
        """Begins a new epoch, unless another process has noticed first."""
        found, _ = await self._read_epoch()
        if not self._adopt_epoch(found):
            await self.declare_restored()

    def _adopt_epoch(self, found: KeyValue | None) -> bool:
        """Takes the stored epoch when it is newer; returns whether it is."""
        stored = 0 if found is None else int(json.loads(found.value)["epoch"])
        is_newer = stored > self._epoch
        self._epoch = max(self._epoch, stored)
        return is_newer

    async def _enter_epoch(self) -> int:
        while True:
            found, cluster_id = await self._read_epoch()
            stored = None if found is None else json.loads(found.value)
            if stored is not None and stored["cluster_id"] == cluster_id:
                return int(stored["epoch"])
            epoch = max(_unix_microseconds(), 0 if stored is None else int(stored["epoch"]) + EPOCH_STEP)
            if await self._write_epoch(epoch, cluster_id, seen=found):
                return epoch

    async def _read_epoch(self) -> tuple[KeyValue | None, int]:
        response = await self._call(KVStub, "Range", rpc_pb2.RangeRequest(key=self._bytes(_EPOCH_KEY)))
        found = [self._key_value(item) for item in response.kvs]
        return (found[0] if found else None), response.header.cluster_id

    async def _write_epoch(self, epoch: int, cluster_id: int, *, seen: KeyValue | None) -> bool:
        value = json.dumps({"epoch": epoch, "cluster_id": cluster_id}).encode()
        condition = Compare(_EPOCH_KEY, mod_revision=0 if seen is None else seen.mod_revision)
        return (await self.commit([Put(_EPOCH_KEY, value)], when=[condition])).succeeded

    # Reads.

    async def get(self, key: str) -> KeyValue | None:
        """One key; none when it does not exist."""
        response = await self._call(KVStub, "Range", rpc_pb2.RangeRequest(key=self._bytes(key)))
        return self._key_value(response.kvs[0]) if response.kvs else None

    async def list(self, prefix: str) -> Listing:
        """All keys below a prefix, at one revision, read page by page."""
        while True:
            with contextlib.suppress(CompactedError):  # While paging: the next listing is a newer one.
                return await self._list(prefix)

    async def _list(self, prefix: str) -> Listing:
        # Another process may have noticed a restored store first.
        self._adopt_epoch((await self._read_epoch())[0])
        start, end = self._range(prefix)
        items: list[KeyValue] = []
        revision = 0
        while True:
            request = rpc_pb2.RangeRequest(key=start, range_end=end, limit=PAGE_KEYS, revision=revision)
            response = await self._call(KVStub, "Range", request)
            revision = revision or response.header.revision
            items += (self._key_value(item) for item in response.kvs if self._is_content(item.key))
            if not response.more:
                return Listing(revision, tuple(items))
            start = response.kvs[-1].key + b"\0"

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[Batch, None]:
        """Yields changes below a prefix after a revision, for ever."""
        start, end = self._range(prefix)
        changes = watch(self._endpoints, start, end, after_revision=after_revision, on_behind=self._check_floor)
        async with contextlib.aclosing(changes):
            while True:
                following = asyncio.ensure_future(anext(changes))
                closed = asyncio.ensure_future(self._closed.wait())
                try:
                    await asyncio.wait({following, closed}, return_when=asyncio.FIRST_COMPLETED)
                    if not following.done():
                        raise StoreError("the store was closed")
                    revision, events = following.result()
                    self._floor = max(self._floor, revision)
                finally:
                    for future in (following, closed):
                        future.cancel()
                    await asyncio.gather(following, closed, return_exceptions=True)
                own = [self._event(event) for event in events if self._is_content(event.kv.key)]
                yield Batch(revision, tuple(sorted(own, key=lambda event: (event.revision, event.key))))

    # Writes.

    async def commit(self, operations: Sequence[Operation], *, when: Sequence[Compare] = ()) -> Outcome:
        """Does all operations in one revision if all conditions hold, else nothing."""
        check_commit(operations, when)
        request = rpc_pb2.TxnRequest(
            compare=[compare for condition in when for compare in self._compares(condition)],
            success=[self._operation(operation) for operation in operations],
        )
        response = await self._call(KVStub, "Txn", request, is_repeatable=False)
        return Outcome(response.succeeded, response.header.revision)

    async def grant_lease(self, ttl_seconds: float) -> int:
        """Makes a lease and returns its id. etcd counts whole seconds, and gives more than asked when it must."""
        if ttl_seconds <= 0:
            raise ValueError("a lease lives longer than nothing")
        # An id of our own, so that asking again after an unknown outcome makes no second lease.
        lease_id = secrets.randbits(_LEASE_ID_BITS) | 1
        request = rpc_pb2.LeaseGrantRequest(ID=lease_id, TTL=math.ceil(ttl_seconds))
        try:
            await self._call(LeaseStub, "LeaseGrant", request)
        except StoreError as failure:
            cause = failure.__cause__
            if not (isinstance(cause, grpc.aio.AioRpcError) and LEASE_EXISTS in (cause.details() or "")):
                raise
        return lease_id

    async def keep_alive(self, lease_id: int) -> None:
        """Gives a lease its whole time again."""
        await self._leases.keep_alive(lease_id)

    async def revoke_lease(self, lease_id: int) -> None:
        """Ends a lease and deletes its keys. Idempotent."""
        with contextlib.suppress(LeaseGoneError):
            await self._call(LeaseStub, "LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=lease_id))

    # Calls and their forms.

    async def _check_floor(self) -> None:
        """Asks the whole cluster, and not one member that may lag, whether it went back."""
        await self._call(KVStub, "Range", rpc_pb2.RangeRequest(key=self._bytes(_EPOCH_KEY)))

    async def _call(self, stub: Any, name: str, request: Any, *, is_repeatable: bool = True) -> Any:
        floor = self._floor
        response = await self._endpoints.call(
            lambda channel: getattr(stub(channel), name), request, is_repeatable=is_repeatable
        )
        revision = response.header.revision
        if 0 < revision < floor:
            self._floor = 0
            _log.error("store_restored", seen_revision=floor, revision=revision)
            await self._enter_epoch_of_restored()
            raise StoreRestoredError(f"etcd went back from revision {floor} to {revision}: everything is read again")
        self._floor = max(self._floor, revision)
        return response

    def _bytes(self, key: str) -> bytes:
        return (self.namespace + key).encode()

    def _text(self, key: bytes) -> str:
        return key.decode()[len(self.namespace) :]

    def _is_content(self, key: bytes) -> bool:
        return key != self._bytes(_EPOCH_KEY)

    def _range(self, prefix: str) -> tuple[bytes, bytes]:
        """Start and end of the keys below a prefix, as etcd wants them."""
        start = self._bytes(prefix)
        # UTF-8 has no byte 0xff, so one can always be added to the last byte.
        return (start, start[:-1] + bytes([start[-1] + 1])) if start else (b"\0", b"\0")

    def _key_value(self, item: kv_pb2.KeyValue) -> KeyValue:
        return KeyValue(self._text(item.key), item.value, item.create_revision, item.mod_revision, item.lease)

    def _event(self, event: kv_pb2.Event) -> Event:
        is_delete = event.type == kv_pb2.Event.DELETE
        kind = EventType.DELETE if is_delete else EventType.PUT
        return Event(kind, self._text(event.kv.key), event.kv.value, event.kv.mod_revision)

    def _compares(self, condition: Compare) -> Sequence[rpc_pb2.Compare]:
        key, form = self._bytes(condition.key), rpc_pb2.Compare
        compares = []
        if condition.mod_revision is not None:
            compares.append(form(key=key, target=form.MOD, result=form.EQUAL, mod_revision=condition.mod_revision))
        if condition.create_revision is not None:
            compares.append(
                form(key=key, target=form.CREATE, result=form.EQUAL, create_revision=condition.create_revision)
            )
        return compares

    def _operation(self, operation: Operation) -> rpc_pb2.RequestOp:
        key = self._bytes(operation.key)
        if isinstance(operation, Put):
            put = rpc_pb2.PutRequest(key=key, value=operation.value, lease=operation.lease_id)
            return rpc_pb2.RequestOp(request_put=put)
        return rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key))


def _unix_microseconds() -> int:
    return time.time_ns() // 1_000
