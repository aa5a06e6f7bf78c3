"""Finds the processes of the embedded cluster, talks to them, and turns failures into an end with a hint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import grpc
import typer
from grpc_status import rpc_status

from kvist import errors
from kvist.controller.v1.controller_pb2_grpc import ControllerServiceStub
from kvist.embedded.layout import ClusterRecord, Layout
from kvist.grpc import TlsFiles
from kvist.kvmaster.v1.kvmaster_pb2_grpc import KvMasterServiceStub
from kvist.router.v1.router_pb2_grpc import RouterServiceStub

EXIT_OTHER = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 4
EXIT_NETWORK = 5
EXIT_AUTHENTICATION = 6
EXIT_SERVER = 8
CALL_TIME_LIMIT_SECONDS = 30.0
# Larger than any answer to a command: a server's limit is the one that counts.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_EXIT_BY_STATUS = {
    "INVALID_ARGUMENT": EXIT_USAGE,
    "NOT_FOUND": EXIT_NOT_FOUND,
    "UNAUTHENTICATED": EXIT_AUTHENTICATION,
    "PERMISSION_DENIED": EXIT_AUTHENTICATION,
}

# What the command was given before its name.
_TLS: ContextVar[TlsFiles | None] = ContextVar("tls", default=None)

RouterEndpoint = Annotated[str | None, typer.Option("--endpoint", help="host:port of a router")]
ControllerEndpoint = Annotated[str | None, typer.Option("--controller", help="host:port of a controller")]


def choose_tls(
    *,
    tls_ca: Annotated[
        Path | None,
        typer.Option("--tls-ca", envvar="KVIST_TLS_CA_FILE", help="authorities of the servers (PEM); turns TLS on"),
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert", envvar="KVIST_TLS_CERTIFICATE_FILE", help="your certificate (PEM), of the role operator"
        ),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", envvar="KVIST_TLS_KEY_FILE", help="key of your certificate (PEM)")
    ] = None,
) -> None:
    """Kvist: a gRPC mesh that serves language models."""
    if (tls_certificate is None) != (tls_key is None):
        raise fail("--tls-cert and --tls-key go together", "", EXIT_USAGE)
    if tls_certificate is not None and tls_ca is None:
        raise fail("--tls-cert needs --tls-ca", "name the authorities of the servers", EXIT_USAGE)
    _TLS.set(None if tls_ca is None else TlsFiles(tls_ca, tls_certificate, tls_key))


def chosen_tls() -> TlsFiles | None:
    """The files that the command was given; none for plain text."""
    return _TLS.get()


def open_sync_channel(address: str) -> grpc.Channel:
    """A channel to a server of the mesh, with TLS when the command was given authorities."""
    options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
    tls = chosen_tls()
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    try:
        credentials = grpc.ssl_channel_credentials(*tls.credentials())
    except OSError as failure:
        raise fail(
            f"a TLS file cannot be read: {failure.strerror}", "check --tls-ca, --tls-cert and --tls-key", EXIT_USAGE
        ) from failure
    return grpc.secure_channel(address, credentials, options=options)


def fail(what: str, hint: str, code: int) -> typer.Exit:
    """Says what happened and what to do, and gives the exit to raise."""
    typer.echo(f"kvist: {what}", err=True)
    if hint:
        typer.echo(f"hint: {hint}", err=True)
    return typer.Exit(code)


def running_record() -> ClusterRecord:
    """The record of the running cluster; ends the command when there is none."""
    record = ClusterRecord.read(Layout.default())
    if record is None or not record.is_supervised():
        raise fail(
            "no embedded cluster runs here", "start one with `kvist up`, or name a server with --endpoint", EXIT_NETWORK
        )
    return record


def address_of(process: str, endpoint: str | None) -> str:
    """`endpoint`, or where the embedded cluster's process listens."""
    if endpoint:
        return endpoint
    record = running_record()
    address = record.addresses.get(process)
    if not address:
        raise fail(f"the {process} has not started yet", "look at `kvist status`", EXIT_NETWORK)
    return address


@contextmanager
def connection(address: str) -> Iterator[grpc.Channel]:
    """A channel whose failed calls end the command with what happened, why, and what to do."""
    with open_sync_channel(address) as channel:
        try:
            yield channel
        except grpc.RpcError as failure:
            raise end_of_call(failure, address) from failure


def end_of_call(failure: grpc.RpcError, address: str) -> typer.Exit:
    """The end of a command whose call has failed."""
    code: grpc.StatusCode = failure.code()
    details = str(failure.details() or "")
    if code is grpc.StatusCode.UNAVAILABLE and "connect" in details.lower():
        return fail(f"nobody answers at {address}", "look at `kvist status` and `kvist doctor`", EXIT_NETWORK)
    error = None
    try:
        status = rpc_status.from_call(failure)
        error = errors.from_status(status) if status is not None else None
    except ValueError:
        # The details contradict the status: a proxy in between has replaced it.
        error = None
    if error is None and code is grpc.StatusCode.UNAVAILABLE and chosen_tls() is None:
        # Without a word of the server's own.
        hint = "if the server speaks TLS, name its authorities with `kvist --tls-ca FILE`"
        return fail(f"the connection to {address} broke off", hint, EXIT_NETWORK)
    if error is None:
        return fail(f"{code.name}: {details}", "", _EXIT_BY_STATUS.get(code.name, EXIT_SERVER))
    lines = [f"{violation.field}: {violation.description}" for violation in error.fields] or [error.message]
    typer.echo("\n".join(f"kvist: {line}" for line in lines), err=True)
    typer.echo(f"hint: {error.code} is explained in docs/errors/{error.code}.md", err=True)
    return typer.Exit(_EXIT_BY_STATUS.get(error.entry.grpc, EXIT_SERVER))


@contextmanager
def router_stub(endpoint: str | None) -> Iterator[RouterServiceStub]:
    """A stub of the router at `endpoint`, or of the embedded cluster's."""
    with connection(address_of("router", endpoint)) as channel:
        yield RouterServiceStub(channel)


@contextmanager
def controller_stub(endpoint: str | None) -> Iterator[ControllerServiceStub]:
    """A stub of the controller at `endpoint`, or of the embedded cluster's."""
    with connection(address_of("controller", endpoint)) as channel:
        yield ControllerServiceStub(channel)


@contextmanager
def kvmaster_stub(endpoint: str | None) -> Iterator[KvMasterServiceStub]:
    """A stub of the KV master at `endpoint`, or of the embedded cluster's."""
    with connection(address_of("kvmaster", endpoint)) as channel:
        yield KvMasterServiceStub(channel)
