"""`kvist apply`, `get`, `describe` and `delete`: resources of the controller."""

from __future__ import annotations

import datetime as dt
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from google.protobuf import json_format

from kvist.agent.v1.agent_pb2 import WorkerPhase, WorkerStatus
from kvist.cli.connection import (
    CALL_TIME_LIMIT_SECONDS,
    EXIT_NOT_FOUND,
    EXIT_OTHER,
    EXIT_USAGE,
    ControllerEndpoint,
    controller_stub,
    fail,
)
from kvist.cli.output import Output, OutputOption, print_json, print_table, print_yaml
from kvist.controller.v1 import controller_pb2 as pb
from kvist.controller.v1.controller_pb2_grpc import ControllerServiceStub
from kvist.embedded.view import role_name
from kvist.errors import KvistError
from kvist.manifest import read_manifests, to_document

MODEL_SERVICE = "ModelService"
# What people type → what is meant. `workers` and `nodes` are seen by the registry and cannot be written.
KINDS = {
    "modelservice": MODEL_SERVICE,
    "modelservices": MODEL_SERVICE,
    "ms": MODEL_SERVICE,
    "worker": "workers",
    "workers": "workers",
    "node": "nodes",
    "nodes": "nodes",
}
POLL_SECONDS = 0.1
GIBIBYTE = 1024**3

FileOption = Annotated[str | None, typer.Option("--filename", "-f", help="YAML file; - for stdin")]
KindArgument = Annotated[str, typer.Argument(help="modelservices (ms), workers or nodes")]
TimeLimit = Annotated[float, typer.Option("--timeout", min=0, help="seconds to wait at most")]


def kind_of(word: str) -> str:
    """The kind that a word names; ends the command when there is none."""
    kind = KINDS.get(word.lower())
    if kind is None:
        raise fail(f"there is no kind {word!r}", "one of modelservices (ms), workers, nodes", EXIT_USAGE)
    return kind


def read_file(filename: str) -> list[pb.Resource]:
    """The resources of a file; ends the command with every wrong field."""
    try:
        text = sys.stdin.read() if filename == "-" else Path(filename).read_text()
    except OSError as error:
        raise fail(f"{filename} cannot be read: {error.strerror}", "", EXIT_USAGE) from error
    except UnicodeDecodeError as error:
        raise fail(f"{filename} is not UTF-8", "", EXIT_USAGE) from error
    try:
        return read_manifests(text)
    except KvistError as error:
        for line in [f"{field.field}: {field.description}" for field in error.fields] or [error.message]:
            typer.echo(f"kvist: {filename}: {line}", err=True)
        raise typer.Exit(EXIT_USAGE) from error


def apply(
    *,
    filename: FileOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check, and change nothing")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="return when all replicas are ready")] = False,
    timeout_seconds: TimeLimit = 300.0,
    controller: ControllerEndpoint = None,
) -> None:
    """Create or change the resources of a file."""
    if filename is None:
        raise fail("no file was given", "kvist apply -f FILE", EXIT_USAGE)
    resources = read_file(filename)
    with controller_stub(controller) as stub:
        for resource in resources:
            response = stub.Apply(
                pb.ApplyRequest(resource=resource, validate_only=dry_run), timeout=CALL_TIME_LIMIT_SECONDS
            )
            result = pb.ApplyResult.Name(response.result).removeprefix("APPLY_RESULT_").lower()
            suffix = " (dry run)" if dry_run else ""
            typer.echo(f"{resource.kind.lower()}/{resource.metadata.name} {result}{suffix}")
        if wait and not dry_run:
            for resource in resources:
                wait_until_ready(stub, resource.metadata.name, timeout_seconds)


def wait_until_ready(stub: ControllerServiceStub, name: str, timeout_seconds: float) -> None:
    """Waits until as many replicas are ready as are wanted, and no others are left."""
    deadline = time.monotonic() + timeout_seconds
    last = ""
    while True:
        resource = stub.Get(pb.GetRequest(kind=MODEL_SERVICE, name=name), timeout=CALL_TIME_LIMIT_SECONDS).resource
        status = json_format.MessageToDict(resource.status)
        if status.get("observedGeneration") == resource.metadata.generation and is_settled(status):
            return
        message = str(status.get("message", ""))
        if message != last:
            last = message
            typer.echo(message, err=True)
        if time.monotonic() > deadline:
            raise fail(f"{name} is not ready after {timeout_seconds:.0f} s", f"kvist describe ms {name}", EXIT_OTHER)
        time.sleep(POLL_SECONDS)


def is_settled(status: dict[str, Any]) -> bool:
    """Whether the replicas of a service are what is wanted."""
    replicas = status.get("replicas", {})
    return bool(
        replicas.get("ready") == replicas.get("desired") == replicas.get("active") and not replicas.get("draining")
    )


def get(
    kind: KindArgument,
    name: Annotated[str | None, typer.Argument(help="one of them")] = None,
    *,
    output: OutputOption = Output.TABLE,
    controller: ControllerEndpoint = None,
) -> None:
    """List resources, workers or nodes."""
    meant = kind_of(kind)
    with controller_stub(controller) as stub:
        if meant == MODEL_SERVICE:
            print_services(find_services(stub, name), output)
        elif meant == "workers":
            print_workers(find_workers(stub, name), output)
        else:
            print_nodes(find_nodes(stub, name), output)


def find_services(stub: ControllerServiceStub, name: str | None) -> list[pb.Resource]:
    """All model services, or one."""
    if name is not None:
        return [stub.Get(pb.GetRequest(kind=MODEL_SERVICE, name=name), timeout=CALL_TIME_LIMIT_SECONDS).resource]
    found: list[pb.Resource] = []
    page_token = ""
    while True:
        page = stub.List(pb.ListRequest(kind=MODEL_SERVICE, page_token=page_token), timeout=CALL_TIME_LIMIT_SECONDS)
        found += page.resources
        page_token = page.next_page_token
        if not page_token:
            return found


def find_nodes(stub: ControllerServiceStub, name: str | None) -> list[pb.NodeEntry]:
    """All nodes, or the one of a name or UID."""
    nodes = list(stub.ListNodes(pb.ListNodesRequest(), timeout=CALL_TIME_LIMIT_SECONDS).nodes)
    if name is None:
        return nodes
    found = [node for node in nodes if name in {node.inventory.name, node.inventory.node_uid}]
    if not found:
        raise fail(f"there is no node {name!r}", "kvist get nodes", EXIT_NOT_FOUND)
    return found


def find_workers(stub: ControllerServiceStub, name: str | None) -> list[tuple[pb.NodeEntry, WorkerStatus]]:
    """All workers with their nodes, or the one of a UID."""
    found = [(node, worker) for node in find_nodes(stub, None) for worker in node.workers]
    if name is None:
        return found
    found = [(node, worker) for node, worker in found if worker.spec.worker_uid == name]
    if not found:
        raise fail(f"there is no worker {name!r}", "kvist get workers", EXIT_NOT_FOUND)
    return found


def print_services(services: list[pb.Resource], output: Output) -> None:
    """Model services in the wanted form."""
    if output is Output.NAME:
        typer.echo("\n".join(f"modelservice/{service.metadata.name}" for service in services))
    elif output is not Output.TABLE:
        print_documents([to_document(service) for service in services], output)
    else:
        rows = []
        for service in services:
            spec, status = (json_format.MessageToDict(part) for part in (service.spec, service.status))
            replicas = status.get("replicas", {})
            rows.append(
                (
                    service.metadata.name,
                    str(spec.get("model", "")),
                    str(spec.get("engine", {}).get("name", "")),
                    f"{int(replicas.get('ready', 0))}/{int(replicas.get('desired', 0))}",
                    age(service.metadata.created_at.ToDatetime(dt.UTC)),
                    str(status.get("message", "")),
                )
            )
        print_table(("name", "model", "engine", "ready", "age", "message"), rows)


def print_workers(workers: list[tuple[pb.NodeEntry, WorkerStatus]], output: Output) -> None:
    """Workers in the wanted form."""
    if output is Output.NAME:
        typer.echo("\n".join(f"worker/{worker.spec.worker_uid}" for _, worker in workers))
    elif output is not Output.TABLE:
        print_documents([json_format.MessageToDict(worker) for _, worker in workers], output)
    else:
        rows = [
            (
                worker.spec.worker_uid,
                worker.spec.model,
                worker.spec.engine,
                role_name(worker.spec.role),
                WorkerPhase.Name(worker.phase).removeprefix("WORKER_PHASE_"),
                str(worker.restarts),
                node.inventory.name,
                worker.address,
                worker.message,
            )
            for node, worker in workers
        ]
        print_table(("worker", "model", "engine", "role", "phase", "restarts", "node", "address", "message"), rows)


def print_nodes(nodes: list[pb.NodeEntry], output: Output) -> None:
    """Nodes in the wanted form."""
    if output is Output.NAME:
        typer.echo("\n".join(f"node/{node.inventory.name}" for node in nodes))
    elif output is not Output.TABLE:
        print_documents([json_format.MessageToDict(node) for node in nodes], output)
    else:
        rows = [
            (
                node.inventory.name,
                node.inventory.node_uid,
                "yes" if node.present else "no",
                str(node.inventory.processors),
                f"{gibibytes(node.load.available_memory_bytes)} of {gibibytes(node.inventory.memory_bytes)} GiB",
                ", ".join(node.inventory.engines),
                str(len(node.workers)),
                node.address,
            )
            for node in nodes
        ]
        print_table(("node", "uid", "present", "processors", "free memory", "engines", "workers", "agent"), rows)


def print_documents(documents: list[dict[str, Any]], output: Output) -> None:
    """A list as JSON or YAML."""
    value = {"items": documents}
    if output is Output.JSON:
        print_json(value)
    else:
        print_yaml(value)


def describe(
    kind: KindArgument,
    name: Annotated[str, typer.Argument(help="which one")],
    *,
    controller: ControllerEndpoint = None,
) -> None:
    """Show everything that is known of one resource, worker or node."""
    meant = kind_of(kind)
    with controller_stub(controller) as stub:
        if meant == "workers":
            print_yaml(json_format.MessageToDict(find_workers(stub, name)[0][1]))
            return
        if meant == "nodes":
            print_yaml(json_format.MessageToDict(find_nodes(stub, name)[0]))
            return
        service = find_services(stub, name)[0]
        print_yaml(to_document(service))
        model = json_format.MessageToDict(service.spec).get("model", name)
        workers = [pair for pair in find_workers(stub, None) if pair[1].spec.model == model]
    typer.echo("workers:")
    print_workers(workers, Output.TABLE)


def delete(
    kind: Annotated[str | None, typer.Argument(help="modelservices (ms)")] = None,
    name: Annotated[str | None, typer.Argument(help="which one")] = None,
    *,
    filename: FileOption = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="return when it is gone")] = True,
    timeout_seconds: TimeLimit = 300.0,
    controller: ControllerEndpoint = None,
) -> None:
    """Delete resources; their workers are drained first."""
    if filename is not None:
        names = [resource.metadata.name for resource in read_file(filename)]
    elif kind is not None and name is not None:
        if kind_of(kind) != MODEL_SERVICE:
            raise fail(
                f"{kind} cannot be deleted", "change the replicas of their model service with `kvist apply`", EXIT_USAGE
            )
        names = [name]
    else:
        raise fail("nothing to delete was given", "kvist delete ms NAME, or kvist delete -f FILE", EXIT_USAGE)
    with controller_stub(controller) as stub:
        for one in names:
            stub.Delete(pb.DeleteRequest(kind=MODEL_SERVICE, name=one), timeout=CALL_TIME_LIMIT_SECONDS)
        for one in names:
            if wait:
                wait_until_gone(stub, one, timeout_seconds)
            typer.echo(f"modelservice/{one} {'deleted' if wait else 'is being deleted'}")


def wait_until_gone(stub: ControllerServiceStub, name: str, timeout_seconds: float) -> None:
    """Waits until a service's workers have drained and it is gone."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        try:
            stub.Get(pb.GetRequest(kind=MODEL_SERVICE, name=name), timeout=CALL_TIME_LIMIT_SECONDS)
        except grpc.RpcError as failure:
            if failure.code() is grpc.StatusCode.NOT_FOUND:
                return
            raise
        time.sleep(POLL_SECONDS)
    raise fail(f"{name} is not gone after {timeout_seconds:.0f} s", f"kvist describe ms {name}", EXIT_OTHER)


def gibibytes(size_bytes: int) -> str:
    """A size in GiB."""
    return f"{size_bytes / GIBIBYTE:.1f}"


def age(since: dt.datetime) -> str:
    """How long ago, in the largest unit that fits."""
    seconds = max(0, int((dt.datetime.now(dt.UTC) - since).total_seconds()))
    for unit_seconds, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= unit_seconds:
            return f"{seconds // unit_seconds}{unit}"
    return f"{seconds}s"
