"""Keeping all leases of a process alive over one stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc

from kvist.etcd.api.rpc_pb2 import LeaseKeepAliveRequest, LeaseKeepAliveResponse
from kvist.etcd.api.rpc_pb2_grpc import LeaseStub
from kvist.etcd.endpoints import Connection, EtcdEndpoints
from kvist.etcd.failures import Verdict, judge
from kvist.store.interface import LeaseGoneError, StoreError

if TYPE_CHECKING:
    KeepAliveCall = grpc.aio.StreamStreamCall[LeaseKeepAliveRequest, LeaseKeepAliveResponse]


class _StreamEndedError(Exception):
    """The stream ended before the answer came."""


class _Stream:
    """One stream, and who waits for an answer on it."""

    def __init__(self, connection: Connection, call: KeepAliveCall) -> None:
        self.connection = connection
        self._call = call
        self._writing = asyncio.Lock()
        # Answers about one lease come in the order of the requests.
        self._waiting: dict[int, deque[asyncio.Future[int]]] = {}
        self.reader = asyncio.create_task(self._read(), name="kvist-etcd-leases")
        self.failure: grpc.aio.AioRpcError | None = None

    async def ask(self, lease_id: int) -> int:
        """The seconds that the lease has got; 0 when it has ended.

        Raises:
            _StreamEndedError: The stream ended before the answer came.
        """
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(lease_id, deque()).append(answer)
        writing = asyncio.ensure_future(self._write(lease_id))
        try:
            # A write on a call that was cancelled early never ends, so it is not waited for alone.
            ends: set[asyncio.Future[Any]] = {answer, self.reader}
            await asyncio.wait({*ends, writing}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and not self.reader.done():
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        if not answer.done() or answer.exception() is not None:
            raise _StreamEndedError
        return answer.result()

    async def _write(self, lease_id: int) -> None:
        async with self._writing:
            # What goes wrong here is the end of the stream, which the reader sees.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._call.write(LeaseKeepAliveRequest(ID=lease_id))

    async def _read(self) -> None:
        try:
            while isinstance(response := await self._call.read(), LeaseKeepAliveResponse):
                waiting = self._waiting.get(response.ID)
                while waiting:
                    answer = waiting.popleft()
                    # One that is done has given up waiting; this response may be a later one's.
                    if not answer.done():
                        answer.set_result(response.TTL)
                        break
        except grpc.aio.AioRpcError as failure:
            self.failure = failure
        finally:
            self._fail_all()

    def _fail_all(self) -> None:
        for answers in self._waiting.values():
            for answer in answers:
                if not answer.done():
                    answer.set_exception(_StreamEndedError())
                    # Whoever waited may be gone.
                    answer.exception()

    async def close(self) -> None:
        """Ends the stream."""
        self._call.cancel()
        self.reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.reader
        # A reader that had not begun yet has told nobody.
        self._fail_all()


class LeaseKeeper:
    """Renews leases. Close it before the endpoints."""

    def __init__(self, endpoints: EtcdEndpoints) -> None:
        self._endpoints = endpoints
        self._opening = asyncio.Lock()
        self._stream: _Stream | None = None

    async def keep_alive(self, lease_id: int) -> None:
        """Gives a lease its whole time again.

        Raises:
            LeaseGoneError: It has ended.
            StoreError: No member has answered in time.
        """
        deadline = asyncio.get_running_loop().time() + self._endpoints.options.time_limit_seconds
        while True:
            stream = await self._open()
            try:
                async with asyncio.timeout(self._endpoints.attempt_seconds):
                    seconds = await stream.ask(lease_id)
            except (_StreamEndedError, TimeoutError) as failure:
                await self._drop(stream)
                if asyncio.get_running_loop().time() >= deadline:
                    raise StoreError("etcd does not renew leases now") from failure
                continue
            if seconds <= 0:
                raise LeaseGoneError(f"lease {lease_id:x} has ended")
            return

    async def _open(self) -> _Stream:
        async with self._opening:
            if self._stream is None:
                connection = await self._endpoints.connect()
                call = LeaseStub(connection.channel).LeaseKeepAlive(metadata=connection.metadata)
                self._stream = _Stream(connection, call)
            return self._stream

    async def _drop(self, stream: _Stream) -> None:
        if self._stream is not stream:
            return
        self._stream = None
        if stream.failure is not None and judge(stream.failure) is Verdict.AUTHENTICATE:
            self._endpoints.forget_token(stream.connection)
        else:
            self._endpoints.leave(stream.connection.address, "leases")
        await stream.close()

    async def close(self) -> None:
        """Ends the stream. Leases live on until they expire."""
        if self._stream is not None:
            await self._stream.close()
            self._stream = None
