"""`kvist up`, `down` and `status`: the embedded cluster."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvist import engines
from kvist.cli.connection import EXIT_SERVER, EXIT_USAGE, fail, running_record
from kvist.cli.output import AsJson, console, print_json
from kvist.embedded.cluster import CannotStartError, EmbeddedCluster, record_failure
from kvist.embedded.layout import ClusterRecord, Layout
from kvist.embedded.observe import Observation, Observer
from kvist.embedded.process import ChildFailedError
from kvist.embedded.spec import MODEL_BY_ENGINE, ClusterSpec
from kvist.embedded.view import lines_to_copy, phase_name, render, role_name, state_name
from kvist.engines.environment import NAMES as INSTALLABLE

STOP_TIME_LIMIT_SECONDS = 90.0
POLL_SECONDS = 0.05
VIEW_INTERVAL_SECONDS = 0.5
STATUS_SCHEMA_VERSION = 1


def up(
    *,
    engine: Annotated[
        str, typer.Option(help="llamacpp (a real model), sim (no model) or vllm (when installed)")
    ] = "llamacpp",
    workers: Annotated[int, typer.Option(min=1, max=64, help="number of workers")] = 2,
    model: Annotated[str, typer.Option(help="name of the model service; by default that of the engine's model")] = "",
    engine_arguments: Annotated[str, typer.Option(help="JSON object for the engine")] = "{}",
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="of the HTTP edge; 0 takes a free one")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="of the router; 0 takes a free one")] = 7000,
    detach: Annotated[bool, typer.Option("--detach", help="return when a request would be answered")] = False,
) -> None:
    """Start the embedded cluster; Ctrl-C stops all of it."""
    layout = Layout.default()
    record = ClusterRecord.read(layout)
    if record is not None and record.phase != "failed" and record.is_supervised():
        raise fail("an embedded cluster runs here already", "stop it with `kvist down`", EXIT_USAGE)
    if engine not in MODEL_BY_ENGINE:
        raise fail(f"there is no engine {engine!r} here", f"one of {', '.join(MODEL_BY_ENGINE)}", EXIT_USAGE)
    if engine in INSTALLABLE and engines.find(engine) is None:
        raise fail(f"{engine} is not installed here", f"kvist engine install {engine} --cpu, or --cuda", EXIT_USAGE)
    spec = ClusterSpec(
        engine=engine,
        model=model or MODEL_BY_ENGINE[engine],
        workers=workers,
        engine_arguments=parse_arguments(engine_arguments),
        http_listen=f"127.0.0.1:{http_port}",
        grpc_listen=f"127.0.0.1:{grpc_port}",
    )
    if detach:
        show(start_detached(layout, time_limit_seconds=spec.startup_seconds), spec.model)
        return
    try:
        asyncio.run(supervise(layout, spec))
    except (CannotStartError, ChildFailedError) as error:
        failed = record_failure(layout, error)
        raise fail(failed.message, failed.hint, EXIT_SERVER) from error


def parse_arguments(text: str) -> dict[str, Any]:
    """The engine's arguments; ends the command when they are no JSON object."""
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise fail(f"--engine-arguments is not JSON: {error}", "such as '{\"slots\": 2}'", EXIT_USAGE) from error
    if not isinstance(arguments, dict):
        raise fail("--engine-arguments is not a JSON object", "such as '{\"slots\": 2}'", EXIT_USAGE)
    return arguments


async def supervise(layout: Layout, spec: ClusterSpec) -> None:
    """Runs the cluster and shows it: a live view on a terminal, else plain lines."""
    layout.record_path.unlink(missing_ok=True)
    terminal = Console(stderr=False)
    running = asyncio.create_task(EmbeddedCluster(layout, spec).run())
    showing = asyncio.create_task(
        show_live(layout, spec, terminal) if terminal.is_terminal else show_plain(layout, spec)
    )
    try:
        await running
    finally:
        showing.cancel()
        await asyncio.wait([showing])
    typer.echo("stopped", err=True)


async def show_live(layout: Layout, spec: ClusterSpec, terminal: Console) -> None:
    """Redraws the view until cancelled. Once the cluster answers, lines to copy stand above it and stay there."""
    is_invited = False
    async with AsyncExitStack() as stack:
        live = stack.enter_context(Live(console=terminal, auto_refresh=False))
        observer: Observer | None = None
        while True:
            record = ClusterRecord.read(layout)
            if record is not None:
                if observer is None and {"controller", "router"} <= record.addresses.keys():
                    # A process that is started again listens where it did, so the channels last.
                    observer = await stack.enter_async_context(Observer(record.addresses))
                seen = Observation() if observer is None else await observer.look()
                if record.phase == "ready" and not is_invited:
                    is_invited = True
                    # The terminal wraps, not the view: a line that is copied must be one line.
                    terminal.print(invitation(record, spec.model), soft_wrap=True)
                    terminal.print(Text("Ctrl-C stops all of it.\n", style="dim"))
                live.update(render(record, seen), refresh=True)
            await asyncio.sleep(VIEW_INTERVAL_SECONDS)


async def show_plain(layout: Layout, spec: ClusterSpec) -> None:
    """Prints a line for each step, then how to use the cluster; returns then."""
    last = ""
    while True:
        record = ClusterRecord.read(layout)
        if record is not None and record.phase == "ready":
            show(record, spec.model)
            return
        if record is not None and record.message != last:
            last = record.message
            typer.echo(last, err=True)
        await asyncio.sleep(POLL_SECONDS)


def start_detached(layout: Layout, *, time_limit_seconds: float) -> ClusterRecord:
    """Starts the supervisor in a session of its own and waits until the cluster answers."""
    layout.make()
    layout.record_path.unlink(missing_ok=True)
    arguments = [argument for argument in sys.argv[1:] if argument != "--detach"]
    with (layout.logs / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvist.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + time_limit_seconds
    last = ""
    while time.monotonic() < deadline:
        record = ClusterRecord.read(layout)
        if record is not None and record.phase == "ready":
            return record
        if record is not None and record.phase == "failed":
            raise fail(record.message, record.hint, EXIT_SERVER)
        if process.poll() is not None:
            raise fail("the supervisor has ended", f"its log is {layout.logs / 'supervisor.log'}", EXIT_SERVER)
        if record is not None and record.message != last:
            last = record.message
            typer.echo(last, err=True)
        time.sleep(POLL_SECONDS)
    process.terminate()
    raise fail("the cluster did not start in time", f"the logs are in {layout.logs}", EXIT_SERVER)


def show(record: ClusterRecord, model: str) -> None:
    """Prints where the cluster answers, and lines to copy."""
    typer.echo(invitation(record, model).plain)


def invitation(record: ClusterRecord, model: str) -> Text:
    """Where the cluster answers, and lines to copy."""
    http, router = record.addresses["http"], record.addresses["router"]
    text = Text(f"Kvist serves {model} at http://{http} (OpenAI) and {router} (gRPC). Try:\n\n")
    for line in lines_to_copy(record, model):
        text.append(f"  {line}\n\n", style="cyan")
    return text


def down() -> None:
    """Stop the embedded cluster."""
    record = running_record()
    os.kill(record.supervisor_process_id, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIME_LIMIT_SECONDS
    while record.is_supervised():
        if time.monotonic() > deadline:
            raise fail("the cluster does not stop", f"its supervisor is process {record.supervisor_process_id}", 1)
        time.sleep(POLL_SECONDS)
    Layout.default().record_path.unlink(missing_ok=True)
    typer.echo("stopped", err=True)


def status(*, as_json: AsJson = False) -> None:
    """Say what runs, where, and how it does."""
    record = running_record()
    seen = asyncio.run(look(record))
    if as_json:
        print_json(status_document(record, seen))
        return
    console().print(render(record, seen))


async def look(record: ClusterRecord) -> Observation:
    """One look at the cluster, as far as it has started."""
    if not {"controller", "router"} <= record.addresses.keys():
        return Observation()
    async with Observer(record.addresses) as observer:
        return await observer.look()


def status_document(record: ClusterRecord, seen: Observation) -> dict[str, Any]:
    """What `kvist status --json` prints. Its keys are stable within a schema version."""
    sources = {source.source.worker_uid: source for source in seen.sources}
    usable = {target.target.worker_uid for target in seen.targets if not target.excluded_reason}
    document = asdict(record)
    document |= {
        "schema_version": STATUS_SCHEMA_VERSION,
        "healthy": record.phase == "ready" and not seen.silent and all(record.process_ids.values()) and bool(usable),
        "silent": list(seen.silent),
        "models": [
            {
                "name": model.name,
                "ready_targets": model.ready_targets,
                "kv_awareness": {
                    "aware": model.kv_awareness.aware,
                    "reason": model.kv_awareness.reason,
                    "sources": model.kv_awareness.sources,
                    "exact_sources": model.kv_awareness.exact_sources,
                    "predicted_cached_tokens": model.kv_awareness.predicted_cached_tokens,
                    "delivered_cached_tokens": model.kv_awareness.delivered_cached_tokens,
                }
                if model.HasField("kv_awareness")
                else None,
            }
            for model in seen.models
        ],
        "workers": [
            {
                "worker_uid": worker.spec.worker_uid,
                "model": worker.spec.model,
                "engine": worker.spec.engine,
                "role": role_name(worker.spec.role),
                "phase": phase_name(worker.phase),
                "message": worker.message,
                "address": worker.address,
                "process_id": worker.process_id,
                "restarts": worker.restarts,
                "incarnation": str(worker.description.incarnation),
                "routable": worker.spec.worker_uid in usable,
                "source_state": state_name(sources[worker.spec.worker_uid].state)
                if worker.spec.worker_uid in sources
                else "",
            }
            for worker in seen.workers
        ],
    }
    return document
