"""`kvist route`: where requests go, and why."""

from __future__ import annotations

from typing import Annotated

import typer
from google.protobuf import json_format

from kvist.cli.connection import CALL_TIME_LIMIT_SECONDS, EXIT_USAGE, RouterEndpoint, fail, router_stub
from kvist.cli.generation import first_model
from kvist.cli.output import AsJson, print_table
from kvist.events.v1 import events_pb2
from kvist.router.v1 import router_pb2

app = typer.Typer(no_args_is_help=True, help="Where requests go, and why.")


@app.callback()
def group() -> None:
    """Where requests go, and why."""


@app.command()
def explain(
    request_id: Annotated[str | None, typer.Argument(help="id of a recent request")] = None,
    *,
    prompt: Annotated[str | None, typer.Option(help="a chat message, for a dry run")] = None,
    model: Annotated[str, typer.Option(help="of the dry run; by default the first that is served")] = "",
    endpoint: RouterEndpoint = None,
    as_json: AsJson = False,
) -> None:
    """Say why a request went where it went, or where a prompt would go."""
    request = router_pb2.ExplainRequest()
    with router_stub(endpoint) as router:
        if request_id is not None:
            request.request_id = request_id
        elif prompt is not None:
            request.dry_run.model = model or first_model(router)
            request.dry_run.prompt.chat.messages.add(role="user", content=prompt)
        else:
            raise fail("neither a request nor a prompt was given", "give a request id, or --prompt TEXT", EXIT_USAGE)
        response = router.Explain(request, timeout=CALL_TIME_LIMIT_SECONDS)
    if as_json:
        typer.echo(json_format.MessageToJson(response, preserving_proto_field_name=True))
        return
    for decision in response.decisions:
        print_decision(decision)


def print_decision(decision: events_pb2.DecisionRecord) -> None:
    """One decision: what was asked, all candidates, and what came of it."""
    typer.echo(
        f"{decision.model}: {decision.prompt_tokens} prompt tokens, {decision.prompt_blocks} usable blocks of "
        f"{decision.block_size_tokens}; policy {decision.policy}, attempt {decision.attempt}{part(decision)}"
    )
    rows = []
    for position, candidate in enumerate(decision.candidates):
        is_chosen = decision.HasField("chosen_candidate") and decision.chosen_candidate == position
        rows.append(
            (
                "→" if is_chosen else "",
                f"{candidate.worker_uid}/{candidate.rank}",
                events_pb2.SourceState.Name(candidate.source_state).removeprefix("SOURCE_STATE_"),
                str(max((match.blocks for match in candidate.matches), default=0)),
                str(candidate.recent_blocks),
                str(candidate.uncached_tokens),
                str(candidate.promised_tokens),
                *cost_columns(candidate),
                candidate.filtered_reason,
            )
        )
    header = ("", "target", "source", "matched blocks", "recent", "uncached", "queued", "queue", "prefill", "others")
    print_table((*header, "cost (ms)", "left out"), rows)
    if decision.outcome:
        receipt = decision.receipt
        outcome = f"outcome {decision.outcome}: {receipt.cached_tokens} of {receipt.prompt_tokens} tokens cached"
        if decision.HasField("predicted_cached_tokens"):
            outcome += f", expected {decision.predicted_cached_tokens}"
        typer.echo(outcome + first_token(decision) + wait(decision))


def part(decision: events_pb2.DecisionRecord) -> str:
    """Which part of a divided request this is, or why it was not divided."""
    if decision.round:
        return f"; {decision.round} of a divided request"
    reasons = {
        "short": "too little of the prompt is uncached",
        "no_prefill": "no prefill worker takes requests",
        "no_pair": "no prefill worker can hand over to a decode worker",
        "not_asked": "it is another gateway's",
    }
    reason = decision.local_prefill_reason
    return f"; not divided: {reasons.get(reason, reason)}" if reason else ""


def wait(decision: events_pb2.DecisionRecord) -> str:
    """How long the request had waited before the decision, if it had."""
    milliseconds = decision.queue_duration.ToMilliseconds()
    return f"; had waited {milliseconds} ms to be let in" if milliseconds else ""


def cost_columns(candidate: events_pb2.Candidate) -> tuple[str, str, str, str]:
    """Queue, prefill (transfer included), what is taken from others, and all of it, in milliseconds."""
    if candidate.filtered_reason:
        return "", "", "", ""
    if not candidate.HasField("cost_terms"):
        return "", "", "", f"{candidate.cost:g} (score)"
    terms = candidate.cost_terms
    parts = (
        terms.queue_seconds,
        terms.prefill_seconds + terms.transfer_seconds,
        terms.displacement_seconds + terms.decode_seconds + terms.pressure_seconds,
        candidate.cost,
    )
    queue, prefill, others, cost = (f"{1000 * seconds:.1f}" for seconds in parts)
    return queue, prefill, others, cost


def first_token(decision: events_pb2.DecisionRecord) -> str:
    """When the first token was expected and when it came, as far as both are known."""
    if not decision.HasField("chosen_candidate") or not decision.HasField("time_to_first_token"):
        return ""
    actual = f"; first token after {decision.time_to_first_token.ToMilliseconds()} ms"
    chosen = decision.candidates[decision.chosen_candidate]
    if not chosen.HasField("cost_terms"):
        return actual
    terms = chosen.cost_terms
    expected = terms.queue_seconds + terms.prefill_seconds + terms.transfer_seconds
    return f"{actual}, expected after {1000 * expected:.0f} ms"
