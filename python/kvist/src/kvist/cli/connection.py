"""Finds the router of the embedded cluster and talks to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import typer

from kvist.embedded.layout import ClusterRecord, Layout
from kvist.router.v1 import router_pb2_grpc

EXIT_USAGE = 2
EXIT_NOT_FOUND = 4
EXIT_NETWORK = 5
EXIT_SERVER = 8
CALL_TIME_LIMIT_SECONDS = 30.0


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
        raise fail("no embedded cluster runs here", "start one with `kvist up`", EXIT_NETWORK)
    return record


@contextmanager
def router_stub(endpoint: str | None) -> Iterator[router_pb2_grpc.RouterServiceStub]:
    """A stub of the router at `endpoint`, or of the embedded cluster's. Call errors end the command with a hint."""
    address = endpoint or running_record().addresses.get("router", "")
    with grpc.insecure_channel(address) as channel:
        try:
            yield router_pb2_grpc.RouterServiceStub(channel)
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.UNAVAILABLE and "connect" in (error.details() or ""):
                raise fail(f"no router answers at {address}", "look at `kvist status`", EXIT_NETWORK) from error
            exit_code = EXIT_NOT_FOUND if code is grpc.StatusCode.NOT_FOUND else EXIT_SERVER
            raise fail(f"{error.details()} ({code.name})", "", exit_code) from error
