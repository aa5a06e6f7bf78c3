"""An embedded cluster as people see it: processes, workers, and lines to copy."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kvist.agent.v1.agent_pb2 import WorkerPhase
from kvist.embedded.layout import ClusterRecord
from kvist.embedded.observe import Observation
from kvist.engine.v1.engine_pb2 import Role
from kvist.events.v1.events_pb2 import SourceState
from kvist.router.v1.router_pb2 import SourceStatus, TargetStatus

_PHASE_STYLES = {"ready": "green", "starting": "yellow", "stopping": "yellow", "failed": "red"}
_WORKER_STYLES = {"READY": "green", "REFUSED": "red", "BACKING_OFF": "red"}
_ORDINARY_ROLE = "aggregate"


def phase_name(phase: WorkerPhase.ValueType) -> str:
    """`READY` and so on; empty before its agent has said anything."""
    return WorkerPhase.Name(phase).removeprefix("WORKER_PHASE_").replace("UNSPECIFIED", "")


def state_name(state: SourceState.ValueType) -> str:
    """`EXACT` and so on."""
    return SourceState.Name(state).removeprefix("SOURCE_STATE_")


def lines_to_copy(record: ClusterRecord, model: str) -> list[str]:
    """What a newcomer may try, a line for the shell each."""
    http, router = record.addresses["http"], record.addresses["router"]
    question = "Tell me, what is the capital of France?"
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "{question}"}}], "max_tokens": 32}}'
    request = f'{{"model": "{model}", "prompt": {{"text": "Hello"}}, "stop": {{"max_tokens": 16}}}}'
    python = (
        f"from openai import OpenAI; print(OpenAI(base_url='http://{http}/v1', api_key='none')"
        f".chat.completions.create(model='{model}', messages=[{{'role': 'user', 'content': '{question}'}}])"
        ".choices[0].message.content)"
    )
    return [
        f"curl http://{http}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        f'.venv/bin/python -c "{python}"',
        f"grpcurl -plaintext -d '{request}' {router} kvist.router.v1.RouterService/Generate",
        f"./task kvist -- chat '{question}'",
    ]


def processes_table(record: ClusterRecord) -> Table:
    """One row for each process that the supervisor started."""
    table = Table("process", "id", "restarts", "listens at", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, process_id in record.process_ids.items():
        address = record.addresses.get(name, "")
        if name == "router":
            address = f"http://{record.addresses.get('http', '')}  grpc {address}"
        table.add_row(name, str(process_id) if process_id else "restarting", str(record.restarts.get(name, 0)), address)
    return table


def workers_table(seen: Observation) -> Table:
    """One row for each worker: what its agent, the router and the index say of it.

    Roles are shown where they say something; what tells whether all is well is not cut in a narrow terminal.
    """
    has_roles = any(role_name(worker.spec.role) != _ORDINARY_ROLE for worker in seen.workers)
    table = Table(
        "worker",
        "model",
        "engine",
        *(["role"] if has_roles else []),
        Column("phase", min_width=len("READY")),
        "id",
        "restarts",
        "running",
        "waiting",
        Column("index", min_width=len("EXACT")),
        "blocks",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    targets: dict[str, TargetStatus] = {target.target.worker_uid: target for target in seen.targets}
    sources: dict[str, SourceStatus] = {source.source.worker_uid: source for source in seen.sources}
    for worker in seen.workers:
        uid = worker.spec.worker_uid
        target, source = targets.get(uid), sources.get(uid)
        phase = phase_name(worker.phase)
        table.add_row(
            uid,
            worker.spec.model,
            worker.spec.engine,
            *([role_name(worker.spec.role)] if has_roles else []),
            Text(phase, style=_WORKER_STYLES.get(phase, "yellow")),
            str(worker.process_id or ""),
            str(worker.restarts),
            str(target.load.running_requests) if target else "",
            str(target.load.waiting_requests) if target else "",
            state_name(source.state) if source else "",
            str(sum(tier.block_count for tier in source.tiers)) if source else "",
        )
    return table


def role_name(role: Role.ValueType) -> str:
    """What a worker is for, as people say it."""
    return Role.Name(role).removeprefix("ROLE_").lower() if role else _ORDINARY_ROLE


def unaware_lines(seen: Observation) -> list[str]:
    """A line for each model of which the router knows too little to route by its caches."""
    lines = []
    for model in seen.models:
        known = model.kv_awareness
        if not model.HasField("kv_awareness") or known.aware:
            continue
        what = {
            "few_exact_sources": f"{known.exact_sources} of {known.sources} workers' caches are known exactly",
            "few_hits_delivered": f"engines found {known.delivered_cached_tokens} of {known.predicted_cached_tokens} "
            "cached tokens that were predicted in the last five minutes",
        }.get(known.reason, known.reason)
        lines.append(f"{model.name} is served without knowing its caches well: {what} (see `kvist kv status`)")
    return lines


def render(record: ClusterRecord, seen: Observation) -> RenderableType:
    """Processes and workers as they are."""
    # While it stops, processes that are gone do not answer, and that is no news.
    is_stopping = record.phase == "stopping"
    heading = Text.assemble(
        ("kvist", "bold"), "  ", (record.phase, _PHASE_STYLES.get(record.phase, "")), f"  {record.message}"
    )
    parts: list[RenderableType] = [heading, processes_table(record), workers_table(seen)]
    if not is_stopping:
        parts.extend(Text(line, style="yellow") for line in unaware_lines(seen))
    if seen.silent and not is_stopping:
        parts.append(Text(f"no answer from: {', '.join(seen.silent)}", style="yellow"))
    return Group(*parts)
