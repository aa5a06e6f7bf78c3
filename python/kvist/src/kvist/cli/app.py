"""The commands."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Annotated

import typer
from google.protobuf import json_format
from rich.console import Console
from rich.table import Table

import kvist
from kvist import _core
from kvist.cli.connection import (
    CALL_TIME_LIMIT_SECONDS,
    EXIT_NETWORK,
    EXIT_SERVER,
    EXIT_USAGE,
    fail,
    router_stub,
    running_record,
)
from kvist.embedded.cluster import ClusterSpec, EmbeddedCluster, record_failure
from kvist.embedded.layout import ClusterRecord, Layout
from kvist.embedded.process import ChildFailedError
from kvist.events.v1 import events_pb2
from kvist.router.v1 import router_pb2

START_TIME_LIMIT_SECONDS = 90.0
POLL_SECONDS = 0.05

app = typer.Typer(no_args_is_help=True, help="Kvist: a gRPC mesh that serves language models.")
route_app = typer.Typer(no_args_is_help=True, help="Where requests go, and why.")
kv_app = typer.Typer(no_args_is_help=True, help="What engines hold.")
app.add_typer(route_app, name="route")
app.add_typer(kv_app, name="kv")

Endpoint = Annotated[str | None, typer.Option(help="host:port of a router; default: the embedded cluster's")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.command()
def up(
    *,
    workers: Annotated[int, typer.Option(min=1, max=64, help="number of workers")] = 2,
    http_port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535)] = 7000,
    engine_arguments: Annotated[str, typer.Option(help="JSON object for the simulated engine")] = "{}",
    detach: Annotated[bool, typer.Option("--detach", help="return when a request would be answered")] = False,
) -> None:
    """Start the embedded cluster; Ctrl-C stops all of it."""
    layout = Layout.default()
    record = ClusterRecord.read(layout)
    if record is not None and record.phase != "failed" and record.is_supervised():
        raise fail("an embedded cluster runs here already", "stop it with `kvist down`", EXIT_USAGE)
    spec = ClusterSpec(
        workers=workers,
        http_listen=f"127.0.0.1:{http_port}",
        grpc_listen=f"127.0.0.1:{grpc_port}",
        engine_arguments=engine_arguments,
    )
    if detach:
        show(detached(layout))
        return
    try:
        asyncio.run(supervise(layout, spec))
    except* ChildFailedError as group:
        error = next(error for error in group.exceptions if isinstance(error, ChildFailedError))
        failed = record_failure(layout, error)
        raise fail(failed.message, failed.hint, EXIT_SERVER) from error


async def supervise(layout: Layout, spec: ClusterSpec) -> None:
    """Runs the cluster and shows how to use it once it answers."""
    layout.record_path.unlink(missing_ok=True)
    cluster = EmbeddedCluster(layout, spec)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(cluster.run())
        while not running.done():
            record = ClusterRecord.read(layout)
            if record is not None and record.phase == "ready":
                show(record)
                return
            await asyncio.sleep(POLL_SECONDS)


def detached(layout: Layout) -> ClusterRecord:
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
    deadline = time.monotonic() + START_TIME_LIMIT_SECONDS
    while time.monotonic() < deadline:
        record = ClusterRecord.read(layout)
        if record is not None and record.phase == "ready":
            return record
        if record is not None and record.phase == "failed":
            raise fail(record.message, record.hint, EXIT_SERVER)
        if process.poll() is not None:
            raise fail("the supervisor has ended", f"its log is {layout.logs / 'supervisor.log'}", EXIT_SERVER)
        time.sleep(POLL_SECONDS)
    process.terminate()
    raise fail("the cluster did not start in time", f"the logs are in {layout.logs}", EXIT_SERVER)


def show(record: ClusterRecord) -> None:
    """Prints what runs, and lines to copy."""
    http, router = record.addresses["http"], record.addresses["router"]
    body = '{"model": "sim", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}'
    request = '{"model": "sim", "prompt": {"text": "Hello"}, "stop": {"max_tokens": 16}}'
    typer.echo(f"Kvist answers on http://{http} (OpenAI) and {router} (gRPC). Try:\n")
    typer.echo(f"  curl http://{http}/v1/chat/completions -H 'content-type: application/json' -d '{body}'")
    typer.echo(f"  grpcurl -plaintext -d '{request}' {router} kvist.router.v1.RouterService/Generate")
    typer.echo("  ./task kvist -- chat Hello\n  ./task kvist -- kv status\n  ./task kvist -- status\n")


@app.command()
def down() -> None:
    """Stop the embedded cluster."""
    record = running_record()
    os.kill(record.supervisor_process_id, signal.SIGTERM)
    deadline = time.monotonic() + START_TIME_LIMIT_SECONDS
    while record.is_supervised():
        if time.monotonic() > deadline:
            raise fail("the cluster does not stop", f"its supervisor is process {record.supervisor_process_id}", 1)
        time.sleep(POLL_SECONDS)
    Layout.default().record_path.unlink(missing_ok=True)
    typer.echo("stopped", err=True)


@app.command()
def status(*, as_json: AsJson = False) -> None:
    """Say what runs and where."""
    record = running_record()
    if as_json:
        typer.echo(json.dumps(asdict(record), indent=2))
        return
    table = Table("process", "id", "address")
    for name, process_id in record.process_ids.items():
        address = record.addresses.get(name, "")
        if name == "router":
            address = f"{record.addresses.get('http', '')} (HTTP), {address} (gRPC)"
        table.add_row(name, str(process_id) if process_id else "restarting", address)
    console = Console()
    console.print(f"phase: {record.phase}")
    console.print(table)


@app.command()
def chat(
    text: Annotated[str, typer.Argument(help="what to say")],
    *,
    model: str = "sim",
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    endpoint: Endpoint = None,
) -> None:
    """Say something to a model and stream its answer."""
    request = router_pb2.GenerateRequest(model=model)
    request.prompt.chat.messages.add(role="user", content=text)
    request.stop.max_tokens = max_tokens
    with router_stub(endpoint) as router:
        usage = None
        for response in router.Generate(request, timeout=600):
            typer.echo(response.delta.text, nl=False)
            if response.HasField("finished"):
                usage = response.finished.usage
    typer.echo("")
    if usage is None:
        raise fail("the answer was cut", "", EXIT_NETWORK)
    typer.echo(
        f"[{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached; {usage.completion_tokens} generated]",
        err=True,
    )


@route_app.command()
def explain(
    request_id: Annotated[str | None, typer.Argument(help="id of a recent request")] = None,
    *,
    prompt: Annotated[str | None, typer.Option(help="a chat message, for a dry run")] = None,
    model: str = "sim",
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Say why a request went where it went, or where a prompt would go."""
    request = router_pb2.ExplainRequest()
    if request_id is not None:
        request.request_id = request_id
    elif prompt is not None:
        request.dry_run.model = model
        request.dry_run.prompt.chat.messages.add(role="user", content=prompt)
    else:
        raise fail("neither a request nor a prompt was given", "give a request id, or --prompt TEXT", EXIT_USAGE)
    with router_stub(endpoint) as router:
        response = router.Explain(request, timeout=CALL_TIME_LIMIT_SECONDS)
    if as_json:
        typer.echo(json_format.MessageToJson(response, preserving_proto_field_name=True))
        return
    for decision in response.decisions:
        print_decision(decision)


def print_decision(decision: events_pb2.DecisionRecord) -> None:
    """One decision as a table."""
    console = Console()
    console.print(
        f"{decision.model}: {decision.prompt_tokens} prompt tokens, {decision.prompt_blocks} usable blocks of "
        f"{decision.block_size_tokens}; policy {decision.policy}, attempt {decision.attempt}"
    )
    table = Table("", "worker", "source", "matched blocks", "uncached", "promised", "cost", "left out")
    for position, candidate in enumerate(decision.candidates):
        is_chosen = decision.HasField("chosen_candidate") and decision.chosen_candidate == position
        table.add_row(
            "→" if is_chosen else "",
            candidate.worker_uid,
            events_pb2.SourceState.Name(candidate.source_state).removeprefix("SOURCE_STATE_"),
            str(max((match.blocks for match in candidate.matches), default=0)),
            str(candidate.uncached_tokens),
            str(candidate.promised_tokens),
            f"{candidate.cost:.0f}",
            candidate.filtered_reason,
        )
    console.print(table)
    if decision.outcome:
        receipt = decision.receipt
        console.print(f"outcome {decision.outcome}: {receipt.cached_tokens} of {receipt.prompt_tokens} tokens cached")


@kv_app.command("status")
def kv_status(*, endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """Show what the router's index knows of each source."""
    with router_stub(endpoint) as router:
        response = router.ListSources(router_pb2.ListSourcesRequest(), timeout=CALL_TIME_LIMIT_SECONDS)
    if as_json:
        typer.echo(json_format.MessageToJson(response, preserving_proto_field_name=True))
        return
    table = Table("source", "state", "batches", "blocks", "digest", "gaps")
    for source in response.sources:
        table.add_row(
            f"{source.source.worker_uid}/{source.source.rank}",
            events_pb2.SourceState.Name(source.state).removeprefix("SOURCE_STATE_"),
            str(source.next_sequence),
            str(sum(tier.block_count for tier in source.tiers)),
            " ".join(tier.digest.hex()[:12] for tier in source.tiers),
            str(source.gaps_total),
        )
    Console().print(table)
    typer.echo(f"{response.index_bytes} of {response.index_byte_budget} bytes", err=True)


@app.command()
def version() -> None:
    """Print the versions."""
    typer.echo(f"kvist {kvist.__version__} (core {_core.__version__})")


def main() -> None:
    """Runs the command."""
    app()
