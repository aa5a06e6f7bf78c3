"""`kvist twin`: what a routing policy is worth, in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvist import _core
from kvist.cli.connection import EXIT_USAGE, fail
from kvist.cli.output import AsJson, print_json
from kvist.errors import from_core

# Traces that are made instead of read.
MADE = ("shared-prefix", "multi-turn")

app = typer.Typer(no_args_is_help=True, help="Routing policies in virtual time.")


@app.callback()
def group() -> None:
    """Routing policies in virtual time."""


@app.command()
def run(
    trace: Annotated[str, typer.Option(help="file in Mooncake's format; or shared-prefix, multi-turn: made ones")],
    *,
    policies: Annotated[
        str, typer.Option(help="names, with commas between; parameters may follow, as in cost:recomputeWeight=1")
    ] = "cost,least_loaded,most_overlap",
    workers: Annotated[int, typer.Option(min=1, max=1000)] = 8,
    blocks: Annotated[int, typer.Option(min=1, help="of 512 tokens, for each worker")] = 4096,
    routers: Annotated[int, typer.Option(min=1, max=100)] = 1,
    prefill_rate: Annotated[float, typer.Option(help="prompt tokens a second, for each worker")] = 15_000.0,
    plain: Annotated[bool, typer.Option("--plain", help="engines that only compute prompts")] = False,
    lag: Annotated[float, typer.Option(min=0, help="of KV events and load reports, seconds")] = 0.005,
    loss: Annotated[float, typer.Option(min=0, max=0.9, help="share of KV events that are lost")] = 0.0,
    spread: Annotated[bool, typer.Option("--spread", help="spread arrivals that were rounded to one time")] = False,
    burst: Annotated[float, typer.Option(min=0, help="arrivals of so many seconds come at once")] = 0.0,
    speed: Annotated[float, typer.Option(help="requests come so many times as fast")] = 1.0,
    begin: Annotated[float, typer.Option("--from", min=0, help="leave out what comes earlier, seconds")] = 0.0,
    until: Annotated[float | None, typer.Option(min=0, help="leave out what comes then or later, seconds")] = None,
    refusals: Annotated[
        int, typer.Option(min=0, help="times that busier workers may refuse a request; 0: routers decide once")
    ] = 16,
    incidents: Annotated[str, typer.Option(help='JSON, as [{"what":"join","at_seconds":60}]')] = "[]",
    seed: Annotated[int, typer.Option(min=0)] = 1,
    plot: Annotated[
        Path | None,
        typer.Option(help="file for an SVG: hit rate against backlog and first token, and backlog over time"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run policies on a trace, each through the same mesh, and compare them.

    Routers, indices, ledgers and the scheduler are those that run live; engines, network and time are simulated.
    """
    mesh: dict[str, Any] = {
        "workers": workers,
        "routers": routers,
        "engine": {"blocks": blocks, "is_full": not plain, "prefill_tokens_per_second": prefill_rate},
        "event_lag_seconds": lag,
        "load_lag_seconds": lag,
        "event_loss": loss,
        "most_refusals": refusals,
        "seed": seed,
    }
    try:
        mesh["incidents"] = json.loads(incidents)
    except ValueError as error:
        raise fail(f"--incidents is not JSON: {error}", "", EXIT_USAGE) from None
    request: dict[str, Any] = {
        "mesh": mesh,
        "policies": [name.strip() for name in policies.split(",") if name.strip()],
        "spread": spread,
        "speed": speed,
        "from_seconds": begin,
        "until_seconds": until,
        "burst_seconds": burst,
    }
    text = ""
    if trace in MADE:
        request["made"] = trace.replace("-", "_")
    else:
        try:
            text = Path(trace).read_text()
        except (OSError, UnicodeDecodeError) as error:
            hint = f"give a file, or one of {', '.join(MADE)}"
            raise fail(f"the trace cannot be read: {error}", hint, EXIT_USAGE) from None
    try:
        study, table, picture = _core.run_twin(json.dumps(request), text)
    except _core.CoreError as error:
        raise fail(from_core(error).message, "", EXIT_USAGE) from None
    if plot is not None:
        try:
            plot.write_text(picture)
        except OSError as error:
            raise fail(f"the plot cannot be written: {error}", "", EXIT_USAGE) from None
    result = json.loads(study)
    if as_json:
        print_json(result)
        return
    typer.echo(_described(result["settings"]))
    typer.echo(table, nl=False)


def _described(settings: dict[str, Any]) -> str:
    engine = settings["engine"]
    described = (
        f"{settings['workers']} workers of {engine['blocks']} blocks of 512 tokens, "
        f"{engine['prefill_tokens_per_second']:.0f} prompt tokens/s"
    )
    if engine["is_full"]:
        described += (
            f" in chunks of {engine['prefill_chunk_tokens']}, "
            f"decode steps of {1000 * engine['decode_step_seconds']:g} ms + "
            f"{1000 * engine['decode_step_seconds_per_request']:g} ms for each further request, "
            f"at most {engine['max_running']} at once"
        )
    return (
        f"{described}; {settings['routers']} routers, events after {1000 * settings['event_lag_seconds']:g} ms, "
        f"loads after {1000 * settings['load_lag_seconds']:g} ms, "
        f"at most {settings['most_refusals']} refusals; seed {settings['seed']}; all times in seconds"
    )
