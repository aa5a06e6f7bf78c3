"""`kvist config`: the settings of a process and where each comes from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import psutil
import typer

from kvist.cli.services import module_of
from kvist.embedded.layout import ClusterRecord, Layout

app = typer.Typer(no_args_is_help=True, help="Settings of processes.")

SHOW_TIME_LIMIT_SECONDS = 60.0


@app.callback()
def group() -> None:
    """Settings of processes."""


@app.command()
def show(
    service: Annotated[str, typer.Argument(help="router, controller, kvmaster, agent or worker")],
    *,
    config: Annotated[Path | None, typer.Option(help="settings file (YAML; JSON for a worker)")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="PATH=VALUE, as the process takes it")] = None,
    origin: Annotated[bool, typer.Option("--origin/--no-origin", help="say where each value comes from")] = True,
) -> None:
    """Print each setting of a process with its origin; secrets are masked.

    Without --config and --set it is the process of the embedded cluster, when one runs; else what a process would begin
    with here.
    """
    arguments = own_arguments(service, config, settings or [])
    if not arguments:
        arguments = running_arguments(service)
    command = [sys.executable, "-m", module_of(service), *arguments, "--show-config"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SHOW_TIME_LIMIT_SECONDS, check=False)
    for line in done.stdout.splitlines():
        typer.echo(line if origin else line.rpartition("  # ")[0])
    raise typer.Exit(done.returncode)


def own_arguments(service: str, config: Path | None, settings: list[str]) -> list[str]:
    """What the caller wants the process to be told."""
    arguments: list[str] = []
    if config is not None:
        arguments += ["--settings-file" if service == "worker" else "--config", str(config)]
    for setting in settings:
        arguments += ["--set", setting]
    return arguments


def running_arguments(service: str) -> list[str]:
    """What the process of the embedded cluster was told; nothing when there is none. Of workers, the first."""
    layout = Layout.default()
    record = ClusterRecord.read(layout)
    if record is None or not record.is_supervised():
        return []
    if service == "worker":
        files = sorted(layout.agent_folder.glob("slots/*/settings.json"))
        return ["--settings-file", str(files[0])] if files else []
    try:
        words = psutil.Process(record.process_ids.get(service, 0)).cmdline()
    except psutil.Error:
        return []
    return words[words.index("-m") + 2 :] if "-m" in words else []
