"""`kvist kv`: what engines hold, as the ledgers, the router and the KV master know it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import grpc
import typer

from kvist.agent.v1.agent_pb2 import AuditRequest
from kvist.agent.v1.agent_pb2_grpc import AgentServiceStub
from kvist.cli.connection import (
    CALL_TIME_LIMIT_SECONDS,
    EXIT_OTHER,
    ControllerEndpoint,
    controller_stub,
    kvmaster_stub,
    open_sync_channel,
    router_stub,
)
from kvist.cli.output import AsJson, print_json, print_table
from kvist.controller.v1.controller_pb2 import ListNodesRequest
from kvist.events.v1.events_pb2 import LedgerDigest, SourceState, TierDigest
from kvist.kvmaster.v1.kvmaster_pb2 import StatsRequest
from kvist.router.v1.router_pb2 import ListSourcesRequest, SourceStatus

SCHEMA_VERSION = 1
DIGEST_CHARACTERS = 12
AUDIT_INTERVAL_SECONDS = 0.2
EQUAL, DIFFERENT, MOVING = "EQUAL", "DIFFERENT", "MOVING"

app = typer.Typer(no_args_is_help=True, help="What engines hold.")

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class View:
    """What one party says of one source.

    Attributes:
        incarnation: Start of the engine.
        next_sequence: Batches of the ledger that it contains.
        state: State of the source; empty for the ledger itself.
        blocks: Blocks in all tiers.
        digest: Digests of all tiers, in hexadecimal.
    """

    incarnation: int
    next_sequence: int
    state: str
    blocks: int
    digest: str

    @classmethod
    def of_ledger(cls, ledger: LedgerDigest) -> View:
        """What a ledger says of itself."""
        return cls(ledger.source.incarnation, ledger.next_sequence, "", _blocks(ledger.tiers), _digest(ledger.tiers))

    @classmethod
    def of_source(cls, source: SourceStatus) -> View:
        """What an index says."""
        state = SourceState.Name(source.state).removeprefix("SOURCE_STATE_")
        return cls(source.source.incarnation, source.next_sequence, state, _blocks(source.tiers), _digest(source.tiers))

    def agrees_with(self, other: View) -> bool | None:
        """Whether both hold the same blocks; none while they are not at the same batch."""
        if (self.incarnation, self.next_sequence) != (other.incarnation, other.next_sequence):
            return None
        return (self.blocks, self.digest) == (other.blocks, other.digest)


@app.callback()
def group() -> None:
    """What engines hold."""


RouterOption = Annotated[str | None, typer.Option("--router", help="host:port of a router")]
KvMasterOption = Annotated[str | None, typer.Option("--kvmaster", help="host:port of a KV master")]


@app.command()
def status(
    *,
    router: RouterOption = None,
    kvmaster: KvMasterOption = None,
    controller: ControllerEndpoint = None,
    as_json: AsJson = False,
) -> None:
    """Compare each ledger with what the router's and the KV master's index hold of it. Exit code 1 when they differ."""
    seen = compare(router, kvmaster, controller)
    if as_json:
        print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "sources": [row.document() for row in seen.rows],
                "router_index": seen.router_memory.document(),
                "kvmaster_index": seen.kvmaster_memory.document(),
            }
        )
    else:
        print_table(
            ("source", "batches", "blocks", "ledger", "router", "", "KV master", "", "verdict"),
            [row.cells() for row in seen.rows],
        )
        typer.echo(
            f"index of the router: {seen.router_memory}; of the KV master: {seen.kvmaster_memory}",
            err=True,
        )
    if any(row.verdict == DIFFERENT for row in seen.rows):
        raise typer.Exit(EXIT_OTHER)


@app.command()
def audit(
    *,
    router: RouterOption = None,
    kvmaster: KvMasterOption = None,
    controller: ControllerEndpoint = None,
    timeout_seconds: Annotated[
        float, typer.Option("--timeout", min=0, help="seconds to wait for a source at most")
    ] = 10,
) -> None:
    """Prove for each source that both indices hold what its ledger holds. Exit code 1 when one does not.

    While events are on their way a source is looked at again, until all three are at the same batch or the time is
    over. One that never rests is shown as MOVING: its digests are compared, batch by batch, by the indices themselves.
    """
    deadline = time.monotonic() + timeout_seconds
    settled: dict[Key, Row] = {}
    while True:
        rows = compare(router, kvmaster, controller).rows
        settled |= {row.key: row for row in rows if row.verdict in {EQUAL, DIFFERENT}}
        open_rows = [row for row in rows if row.key not in settled]
        if not open_rows or time.monotonic() > deadline:
            break
        time.sleep(AUDIT_INTERVAL_SECONDS)
    shown = sorted([*settled.values(), *open_rows], key=lambda row: row.key)
    for row in shown:
        typer.echo(row.line())
    if any(row.verdict not in {EQUAL, MOVING} for row in shown):
        raise typer.Exit(EXIT_OTHER)


@dataclass(frozen=True, slots=True)
class Memory:
    """What an index takes, in bytes."""

    used_bytes: int
    budget_bytes: int

    def __str__(self) -> str:
        """For people."""
        return f"{self.used_bytes:,} of {self.budget_bytes:,} bytes"

    def document(self) -> dict[str, int]:
        """As JSON."""
        return {"bytes": self.used_bytes, "byte_budget": self.budget_bytes}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One look at all three parties."""

    rows: list[Row]
    router_memory: Memory
    kvmaster_memory: Memory


def compare(router: str | None, kvmaster: str | None, controller: str | None) -> Comparison:
    """Asks ledgers, router and KV master, one after the other; who moves meanwhile is seen to."""
    with router_stub(router) as stub:
        listed = stub.ListSources(ListSourcesRequest(), timeout=CALL_TIME_LIMIT_SECONDS)
    with kvmaster_stub(kvmaster) as stub:
        stats = stub.Stats(StatsRequest(), timeout=CALL_TIME_LIMIT_SECONDS)
    ledgers = read_ledgers(controller)
    in_router = {_key(source): View.of_source(source) for source in listed.sources}
    in_kvmaster = {_key(source): View.of_source(source) for source in stats.sources}
    keys = sorted(ledgers.keys() | in_router.keys() | in_kvmaster.keys())
    return Comparison(
        rows=[Row(key, ledgers.get(key), in_router.get(key), in_kvmaster.get(key)) for key in keys],
        router_memory=Memory(listed.index_bytes, listed.index_byte_budget),
        kvmaster_memory=Memory(stats.index_bytes, stats.index_byte_budget),
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One source as its ledger, the router and the KV master see it."""

    key: Key
    ledger: View | None
    router: View | None
    kvmaster: View | None

    @property
    def verdict(self) -> str:
        """`EQUAL`, `DIFFERENT`, `MOVING` while batches are on their way, or who knows nothing."""
        if self.ledger is None:
            return "NO LEDGER ANSWERS"
        verdicts = []
        for name, view in (("ROUTER", self.router), ("KV MASTER", self.kvmaster)):
            if view is None:
                return f"UNKNOWN TO {name}"
            verdicts.append(view.agrees_with(self.ledger))
        if False in verdicts:
            return DIFFERENT
        return MOVING if None in verdicts else EQUAL

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        shown = self.ledger or self.router or self.kvmaster
        return (
            f"{self.key[0]}/{self.key[1]}",
            str(shown.next_sequence) if shown else "",
            str(shown.blocks) if shown else "",
            self.ledger.digest if self.ledger else "",
            self.router.digest if self.router else "",
            self.router.state if self.router else "",
            self.kvmaster.digest if self.kvmaster else "",
            self.kvmaster.state if self.kvmaster else "",
            self.verdict,
        )

    def line(self) -> str:
        """The row as one line, for logs and eyes."""
        shown = self.ledger or self.router or self.kvmaster
        if shown is None:
            return f"{self.key[0]}/{self.key[1]} {self.verdict}"
        return (
            f"{self.key[0]}/{self.key[1]} {self.verdict} at batch {shown.next_sequence} of incarnation "
            f"{shown.incarnation}: {shown.blocks} blocks, digest {shown.digest or 'of nothing'}"
        )

    def document(self) -> dict[str, object]:
        """The row as JSON."""
        views: Mapping[str, View | None] = {"ledger": self.ledger, "router": self.router, "kvmaster": self.kvmaster}
        return {
            "worker_uid": self.key[0],
            "rank": self.key[1],
            "verdict": self.verdict,
            **{
                name: None
                if view is None
                else {
                    "incarnation": str(view.incarnation),
                    "next_sequence": view.next_sequence,
                    "state": view.state,
                    "blocks": view.blocks,
                    "digest": view.digest,
                }
                for name, view in views.items()
            },
        }


def read_ledgers(controller: str | None) -> dict[Key, View]:
    """Digests of all ledgers, by way of the agents. An agent that does not answer is left out and named."""
    with controller_stub(controller) as stub:
        nodes = stub.ListNodes(ListNodesRequest(), timeout=CALL_TIME_LIMIT_SECONDS).nodes
    ledgers: dict[Key, View] = {}
    for node in nodes:
        if not node.address:
            continue
        with open_sync_channel(node.address) as channel:
            try:
                audit = AgentServiceStub(channel).Audit(AuditRequest(), timeout=CALL_TIME_LIMIT_SECONDS)
            except grpc.RpcError as failure:
                typer.echo(
                    f"kvist: the agent of node {node.inventory.name} does not answer: {failure.code()}", err=True
                )
                continue
        for digest in audit.digests:
            ledgers[digest.source.worker_uid, digest.source.rank] = View.of_ledger(digest)
    return ledgers


def _key(source: SourceStatus) -> Key:
    return source.source.worker_uid, source.source.rank


def _blocks(tiers: Iterable[TierDigest]) -> int:
    return sum(tier.block_count for tier in tiers)


def _digest(tiers: Iterable[TierDigest]) -> str:
    return " ".join(tier.digest.hex()[:DIGEST_CHARACTERS] for tier in tiers if tier.block_count)
