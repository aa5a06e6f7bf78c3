"""Errors of the one catalogue, as Python raises them, and their way over gRPC.

The codes live in `crates/errors`; this module reads them from the core, so the two languages cannot disagree.
A message is public: it holds no prompt content, no address and no path.

The library of gRPC is imported where an error travels by it: a router speaks gRPC in Rust and may have no need of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from kvist import _core

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message
    from google.rpc import status_pb2

DOMAIN = "kvist.dev"
_NOT_STARTED = "not_started"


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One code of the catalogue.

    Attributes:
        code: Stable name, UPPER_SNAKE.
        grpc: Name of the gRPC status.
        grpc_number: Number of the gRPC status.
        http: HTTP status.
        retryable: Whether the same call may succeed later without a change.
        title: One line for people.
    """

    code: str
    grpc: str
    grpc_number: int
    http: int
    retryable: bool
    title: str


CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType(
    {entry["code"]: CatalogueEntry(**entry) for entry in json.loads(_core.error_catalogue())}
)


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A wrong field and why.

    Attributes:
        field: Path as the caller wrote it, such as `spec.replicas`.
        description: What is wrong and what would be right.
    """

    field: str
    description: str


class KvistError(Exception):
    """The root of all errors that a caller may see. Made by `error`, which picks the class of the code."""

    default_code = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        fields: Sequence[FieldViolation] = (),
        metadata: Mapping[str, str] | None = None,
        retry_after_seconds: float | None = None,
        not_started: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.message = message
        self.fields = tuple(fields)
        self.metadata = dict(metadata or {})
        self.retry_after_seconds = retry_after_seconds
        self.not_started = not_started

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    @property
    def entry(self) -> CatalogueEntry:
        """The code's line of the catalogue; that of `INTERNAL` for a code of another version."""
        return CATALOGUE.get(self.code) or CATALOGUE["INTERNAL"]


class InvalidRequestError(KvistError):
    """The caller must change the request."""

    default_code = "INVALID_ARGUMENT"


class AuthenticationError(KvistError):
    """The caller is not known."""

    default_code = "INVALID_API_KEY"


class NotFoundError(KvistError):
    """What was asked for does not exist."""

    default_code = "NOT_FOUND"


class AlreadyExistsError(KvistError):
    """It is there already."""

    default_code = "ALREADY_EXISTS"


class ConflictError(KvistError):
    """Somebody else changed it: read again, then decide again."""

    default_code = "CONFLICT"


class PreconditionError(KvistError):
    """The state of the system does not allow it; repeating does not help."""

    default_code = "STALE_FENCE"


class OverloadedError(KvistError):
    """Too much at once: come back later."""

    default_code = "OVERLOADED"


class UnavailableError(KvistError):
    """Not reachable at the moment: try again."""

    default_code = "NOT_READY"


class DeadlineExceededError(KvistError):
    """Time is up."""

    default_code = "DEADLINE_EXCEEDED"


class CancelledError(KvistError):
    """The caller ended the call. Not `asyncio.CancelledError`."""

    default_code = "CANCELLED"


class UnsupportedError(KvistError):
    """This version or engine cannot do it."""

    default_code = "NOT_IMPLEMENTED"


class InternalError(KvistError):
    """A fault of Kvist."""


_CLASSES: Mapping[str, type[KvistError]] = MappingProxyType(
    {
        "INVALID_ARGUMENT": InvalidRequestError,
        "OUT_OF_RANGE": InvalidRequestError,
        "UNAUTHENTICATED": AuthenticationError,
        "PERMISSION_DENIED": AuthenticationError,
        "NOT_FOUND": NotFoundError,
        "ALREADY_EXISTS": AlreadyExistsError,
        "ABORTED": ConflictError,
        "FAILED_PRECONDITION": PreconditionError,
        "RESOURCE_EXHAUSTED": OverloadedError,
        "UNAVAILABLE": UnavailableError,
        "DEADLINE_EXCEEDED": DeadlineExceededError,
        "CANCELLED": CancelledError,
        "UNIMPLEMENTED": UnsupportedError,
    }
)
# The nearest code of a status that Kvist did not make.
_NEAREST: Mapping[str, str] = MappingProxyType(
    {name: cls.default_code for name, cls in _CLASSES.items()} | {"UNAVAILABLE": "ENGINE_UNAVAILABLE"}
)


def error(code: str, message: str, **details: Any) -> KvistError:
    """Makes the error of a code, of the class that the code's gRPC status names."""
    entry = CATALOGUE.get(code)
    cls = _CLASSES.get(entry.grpc, InternalError) if entry else InternalError
    return cls(message, code=code, **details)


def invalid(violations: Sequence[FieldViolation], *, code: str = "INVALID_ARGUMENT") -> InvalidRequestError:
    """The error of one or more wrong fields; its message names each."""
    message = "; ".join(f"{violation.field}: {violation.description}" for violation in violations)
    return InvalidRequestError(message, code=code, fields=violations)


def invalid_field(field: str, description: str, *, code: str = "INVALID_ARGUMENT") -> InvalidRequestError:
    """The error of one wrong field."""
    return invalid((FieldViolation(field, description),), code=code)


def to_status(failure: KvistError) -> status_pb2.Status:
    """The error as `google.rpc.Status`, with ErrorInfo and, where they apply, BadRequest and RetryInfo."""
    from google.protobuf import any_pb2, duration_pb2  # noqa: PLC0415
    from google.rpc import error_details_pb2, status_pb2  # noqa: PLC0415

    metadata = dict(failure.metadata)
    if failure.not_started:
        metadata[_NOT_STARTED] = "true"
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=failure.code, domain=DOMAIN, metadata=metadata),
    ]
    if failure.fields:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=violation.field, description=violation.description)
            for violation in failure.fields
        ]
        details.append(error_details_pb2.BadRequest(field_violations=violations))
    if failure.retry_after_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(failure.retry_after_seconds * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        wrapper = any_pb2.Any()
        wrapper.Pack(detail)
        packed.append(wrapper)
    return status_pb2.Status(code=failure.entry.grpc_number, message=failure.message, details=packed)


def from_status(status: status_pb2.Status) -> KvistError:
    """Reads an error; a status of another origin gets the nearest code."""
    import grpc  # noqa: PLC0415
    from google.rpc import error_details_pb2  # noqa: PLC0415

    grpc_name = next((known.name for known in grpc.StatusCode if known.value[0] == status.code), "UNKNOWN")
    code = _NEAREST.get(grpc_name, "INTERNAL")
    metadata: dict[str, str] = {}
    fields: list[FieldViolation] = []
    retry_after_seconds: float | None = None
    for detail in status.details:
        info, request, retry = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
        )
        if detail.Unpack(info) and info.domain == DOMAIN:
            metadata = dict(info.metadata)
            if info.reason in CATALOGUE:
                code = info.reason
        elif detail.Unpack(request):
            fields = [FieldViolation(item.field, item.description) for item in request.field_violations]
        elif detail.Unpack(retry):
            retry_after_seconds = retry.retry_delay.ToNanoseconds() / 1e9
    not_started = metadata.pop(_NOT_STARTED, "") == "true"
    return error(
        code,
        status.message,
        fields=fields,
        metadata=metadata,
        retry_after_seconds=retry_after_seconds,
        not_started=not_started,
    )


def from_rpc_error(failure: grpc.aio.AioRpcError) -> KvistError:
    """Reads the error of a failed call."""
    from google.rpc import status_pb2  # noqa: PLC0415
    from grpc_status import rpc_status  # noqa: PLC0415

    try:
        status = rpc_status.from_call(failure)
    except ValueError:
        # The details contradict the status: a proxy in between has replaced it.
        status = None
    if status is None:
        code: int = failure.code().value[0]
        status = status_pb2.Status(code=code, message=failure.details() or "")
    return from_status(status)


def from_core(failure: _core.CoreError) -> KvistError:
    """Reads an error that the Rust core raised."""
    code, message, details_json = failure.args
    details = json.loads(details_json or "{}")
    retry_after_ms = details.get("retry_after_ms")
    return error(
        code,
        message,
        fields=[FieldViolation(item["field"], item["description"]) for item in details.get("fields", ())],
        metadata=details.get("metadata", {}),
        retry_after_seconds=None if retry_after_ms is None else retry_after_ms / 1000,
        not_started=bool(details.get("not_started", False)),
    )


@contextmanager
def rpc_errors() -> Iterator[None]:
    """Turns failed calls in its body into errors of the catalogue."""
    import grpc  # noqa: PLC0415

    try:
        yield
    except grpc.aio.AioRpcError as failure:
        raise from_rpc_error(failure) from failure


@contextmanager
def core_errors() -> Iterator[None]:
    """Turns failures of the Rust core in its body into errors of the catalogue."""
    try:
        yield
    except _core.CoreError as failure:
        raise from_core(failure) from failure


async def abort(context: grpc.aio.ServicerContext[Any, Any], failure: KvistError) -> NoReturn:
    """Ends a call with an error."""
    from grpc_status import rpc_status  # noqa: PLC0415

    await context.abort_with_status(rpc_status.to_status(to_status(failure)))
    raise AssertionError("abort_with_status returned")  # pragma: no cover
