"""A watch that moves from member to member and misses nothing.

A watch knows the revision up to which it has seen everything and resumes after it. A member that says nothing is asked
for its progress; one that does not answer that is left. Progress also moves the watch forward while nothing changes, so
that compaction seldom overtakes it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

import grpc

from kvist.etcd.api.kv_pb2 import Event
from kvist.etcd.api.rpc_pb2 import WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse
from kvist.etcd.api.rpc_pb2_grpc import WatchStub
from kvist.etcd.endpoints import Connection, EtcdEndpoints
from kvist.etcd.failures import is_own_cancellation, is_token_stale
from kvist.store.interface import AccessError, CompactedError, StoreError

# A stream that was silent for so long is asked for its progress, and left when it is silent for as long again.
SILENCE_SECONDS = 2.0

Changes = tuple[int, list[Event]]


class _BrokenError(Exception):
    """This member does not go on; another one may."""


class _StaleTokenError(Exception):
    """The member wants a new authentication."""


async def watch(
    endpoints: EtcdEndpoints,
    key: bytes,
    range_end: bytes,
    *,
    after_revision: int,
    on_behind: Callable[[], Awaitable[None]],
) -> AsyncGenerator[Changes, None]:
    """Yields (revision, events) for ever: all changes of the range up to that revision have been given then.

    Args:
        endpoints: Whom to ask.
        key: First key of the range.
        range_end: First key after the range.
        after_revision: Where to begin.
        on_behind: Called when a member is at an older revision than was seen: it lags, or etcd was restored.

    Raises:
        CompactedError: The history after the revision is gone.
        StoreError: No member has answered for the time limit of a call.
    """
    position = after_revision
    loop = asyncio.get_running_loop()
    answered_at = loop.time()
    while True:
        connection = await endpoints.connect()
        try:
            async with contextlib.aclosing(_stream(connection, key, range_end, after_revision=position)) as changes:
                async for revision, events in changes:
                    answered_at = loop.time()
                    if revision < position:
                        await on_behind()
                    elif revision > position:
                        position = revision
                        yield revision, events
        except _StaleTokenError:
            endpoints.forget_token(connection)
        except _BrokenError as failure:
            endpoints.leave(connection.address, str(failure))
            if loop.time() - answered_at > endpoints.options.time_limit_seconds:
                raise StoreError(f"no member of etcd watches now: {failure}") from failure
            await asyncio.sleep(0.02)


async def _stream(
    connection: Connection, key: bytes, range_end: bytes, *, after_revision: int
) -> AsyncGenerator[Changes, None]:
    """The watch at one member, until it breaks."""
    call = WatchStub(connection.channel).Watch(metadata=connection.metadata)
    fragments: list[Event] = []
    is_asked = False
    reading: asyncio.Future[object] | None = None
    try:
        # From the revision that was seen on, and not the one after it: etcd gives no progress to a watch that begins in
        # the future, and a quiet store would look like a dead member.
        create = WatchCreateRequest(
            key=key, range_end=range_end, start_revision=max(1, after_revision), progress_notify=True, fragment=True
        )
        async with asyncio.timeout(SILENCE_SECONDS):
            await call.write(WatchRequest(create_request=create))
        while True:
            reading = reading or asyncio.ensure_future(call.read())
            done, _ = await asyncio.wait({reading}, timeout=SILENCE_SECONDS)
            if not done:
                if is_asked:
                    raise _BrokenError("it says nothing")
                is_asked = True
                async with asyncio.timeout(SILENCE_SECONDS):
                    await call.write(WatchRequest(progress_request=WatchProgressRequest()))
                continue
            response, reading = _result(reading), None
            is_asked = False
            _check(response)
            if response.created:
                # The member's own revision: what lies between is still to come.
                yield min(response.header.revision, after_revision), []
                continue
            fragments += (event for event in response.events if event.kv.mod_revision > after_revision)
            # All changes of a revision belong together.
            if not response.fragment:
                events, fragments = fragments, []
                yield response.header.revision, events
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as failure:
        raise _BrokenError(str(failure)) from failure
    except asyncio.CancelledError:
        if is_own_cancellation():
            raise
        raise _BrokenError("the channel was closed") from None
    finally:
        call.cancel()
        if reading is not None:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await reading


def _result(reading: asyncio.Future[object]) -> WatchResponse:
    # The channel's end cancels the read, which is not this task's cancellation.
    response = None if reading.cancelled() else reading.result()
    if not isinstance(response, WatchResponse):
        raise _BrokenError("the stream has ended")
    return response


def _check(response: WatchResponse) -> None:
    """Raises what a cancelled watch was cancelled for."""
    if not response.canceled:
        return
    # etcd 3.4 gives no reason with a compaction, so the number is what tells.
    if response.compact_revision:
        raise CompactedError(f"the history before revision {response.compact_revision} is gone")
    if is_token_stale(response.cancel_reason):
        raise _StaleTokenError
    if "permission denied" in response.cancel_reason or "user name is empty" in response.cancel_reason:
        raise AccessError(f"etcd refuses the watch: {response.cancel_reason}")
    raise _BrokenError(response.cancel_reason or "cancelled")
