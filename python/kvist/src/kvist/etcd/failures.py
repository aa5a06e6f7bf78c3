"""What a failed call to etcd means: try again, authenticate again, unknown, or one of the store's errors.

etcd tells errors apart by their text; the texts are those of `api/v3rpc/rpctypes/error.go` of etcd 3.7.
"""

from __future__ import annotations

import asyncio
import enum

import grpc

from kvist.store.interface import (
    AccessError,
    CompactedError,
    LeaseGoneError,
    StoreError,
    StoreFullError,
    TooLargeError,
)

LEASE_EXISTS = "lease already exists"
_STALE_TOKEN = ("invalid auth token", "revision of auth store is old")
_TOO_LARGE = ("request is too large", "too many operations in txn request")
_LOST_CODES = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
    }
)


class Verdict(enum.Enum):
    """What to do about a failed call."""

    # It was not done, and another member or moment may do it.
    NOT_DONE = enum.auto()
    # It was not done, because the token has expired.
    AUTHENTICATE = enum.auto()
    # It may have been done: a put that timed out can be committed all the same.
    UNKNOWN = enum.auto()
    # It was refused; asking again changes nothing.
    FINAL = enum.auto()


def judge(failure: grpc.aio.AioRpcError) -> Verdict:
    """What to do about a failed call."""
    text = failure.details() or ""
    if is_token_stale(text):
        return Verdict.AUTHENTICATE
    if "too many requests" in text or "not supported for learner" in text:
        return Verdict.NOT_DONE
    return Verdict.UNKNOWN if failure.code() in _LOST_CODES else Verdict.FINAL


def is_own_cancellation() -> bool:
    """Whether a `CancelledError` that was caught is of this task, and not of a call whose channel was closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_token_stale(text: str) -> bool:
    """Whether etcd refuses the token of an earlier authentication."""
    return any(part in text for part in _STALE_TOKEN)


def to_store_error(failure: grpc.aio.AioRpcError) -> StoreError:
    """The store's error for a refusal."""
    text = failure.details() or failure.code().name
    if "database space exceeded" in text:
        return StoreFullError(
            "etcd has raised its NOSPACE alarm and takes no writes: compact and defragment it, then disarm the alarm"
        )
    if "requested lease not found" in text:
        return LeaseGoneError("the lease has ended")
    if "required revision has been compacted" in text:
        return CompactedError("the history is gone")
    if any(part in text for part in _TOO_LARGE):
        return TooLargeError(f"etcd refuses the size: {text}")
    is_identity = "user name is empty" in text or "authentication failed" in text
    if is_identity or failure.code() in {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}:
        return AccessError(f"etcd refuses the user: {text}")
    return StoreError(f"etcd refuses the call: {text}")
