"""`kvist config`: the settings of a process and where each comes from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvist.cli.services import module_of

app = typer.Typer(no_args_is_help=True, help="Settings of processes.")

# Workers are told by whoever starts them, so they have no file of their own.
SHOW_TIME_LIMIT_SECONDS = 60.0


@app.callback()
def group() -> None:
    """Settings of processes."""


@app.command()
def show(
    service: Annotated[str, typer.Argument(help="router, controller, kvmaster or agent")],
    *,
    config: Annotated[Path | None, typer.Option(help="settings file (YAML)")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="PATH=VALUE, as the process takes it")] = None,
    origin: Annotated[bool, typer.Option("--origin/--no-origin", help="say where each value comes from")] = True,
) -> None:
    """Print each setting of a process, as it would start now, with its origin. Secrets are masked."""
    command = [sys.executable, "-m", module_of(service), "--show-config"]
    if config is not None:
        command += ["--config", str(config)]
    for setting in settings or ():
        command += ["--set", setting]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SHOW_TIME_LIMIT_SECONDS, check=False)
    for line in done.stdout.splitlines():
        typer.echo(line if origin else line.rpartition("  # ")[0])
    raise typer.Exit(done.returncode)
