"""`kvist kv`: what engines hold, as the ledgers, the router and the KV master know it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import grpc
import typer

from kvist.agent.v1.agent_pb2 import AuditRequest
from kvist.agent.v1.agent_pb2_grpc import AgentServiceStub
from kvist.cli.connection import (
    CALL_TIME_LIMIT_SECONDS,
    EXIT_OTHER,
    controller_stub,
    kvmaster_stub,
    router_stub,
)
from kvist.cli.output import AsJson, print_json, print_table
from kvist.controller.v1.controller_pb2 import ListNodesRequest
from kvist.events.v1.events_pb2 import LedgerDigest, SourceState, TierDigest
from kvist.kvmaster.v1.kvmaster_pb2 import StatsRequest
from kvist.router.v1.router_pb2 import ListSourcesRequest, SourceStatus

SCHEMA_VERSION = 1
DIGEST_CHARACTERS = 12

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


@app.command()
def status(
    *,
    router: str | None = typer.Option(None, "--router", help="host:port of a router"),
    kvmaster: str | None = typer.Option(None, "--kvmaster", help="host:port of a KV master"),
    controller: str | None = typer.Option(None, "--controller", help="host:port of a controller"),
    as_json: AsJson = False,
) -> None:
    """Compare each ledger with what the router's and the KV master's index hold of it. Exit code 1 when they differ."""
    with router_stub(router) as stub:
        listed = stub.ListSources(ListSourcesRequest(), timeout=CALL_TIME_LIMIT_SECONDS)
    with kvmaster_stub(kvmaster) as stub:
        stats = stub.Stats(StatsRequest(), timeout=CALL_TIME_LIMIT_SECONDS)
    ledgers = read_ledgers(controller)
    in_router = {_key(source): View.of_source(source) for source in listed.sources}
    in_kvmaster = {_key(source): View.of_source(source) for source in stats.sources}
    rows = [
        Row(key, ledgers.get(key), in_router.get(key), in_kvmaster.get(key))
        for key in sorted(ledgers.keys() | in_router.keys() | in_kvmaster.keys())
    ]
    if as_json:
        print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "sources": [row.document() for row in rows],
                "router_index": {"bytes": listed.index_bytes, "byte_budget": listed.index_byte_budget},
                "kvmaster_index": {"bytes": stats.index_bytes, "byte_budget": stats.index_byte_budget},
            }
        )
    else:
        print_table(
            ("source", "batches", "blocks", "ledger", "router", "", "KV master", "", "verdict"),
            [row.cells() for row in rows],
        )
        typer.echo(
            f"index of the router: {listed.index_bytes:,} of {listed.index_byte_budget:,} bytes; "
            f"of the KV master: {stats.index_bytes:,} of {stats.index_byte_budget:,}",
            err=True,
        )
    if any(row.verdict == "DIFFERENT" for row in rows):
        raise typer.Exit(EXIT_OTHER)


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
            return "DIFFERENT"
        return "MOVING" if None in verdicts else "EQUAL"

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
        with grpc.insecure_channel(node.address) as channel:
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
