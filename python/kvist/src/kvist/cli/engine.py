"""`kvist engine`: engines with environments of their own."""

from __future__ import annotations

from typing import Annotated

import typer

from kvist.cli.connection import EXIT_OTHER, EXIT_USAGE, fail
from kvist.cli.output import AsJson, print_json, print_table
from kvist.engines.environment import NAMES, EngineEnvironment
from kvist.engines.install import InstallError
from kvist.engines.install import install as install_engine

SCHEMA_VERSION = 1

app = typer.Typer(no_args_is_help=True, help="Engines that have an environment of their own.")


@app.command()
def install(
    name: Annotated[str, typer.Argument(help=f"which: {', '.join(NAMES)}")],
    *,
    cpu: Annotated[bool, typer.Option("--cpu", help="for machines without a GPU")] = False,
    cuda: Annotated[bool, typer.Option("--cuda", help="for NVIDIA GPUs")] = False,
) -> None:
    """Install an engine; what is there already is kept."""
    if name not in NAMES:
        raise fail(f"there is no engine {name!r} to install", f"one of {', '.join(NAMES)}", EXIT_USAGE)
    if cpu == cuda:
        raise fail("say what it shall compute on", "--cpu or --cuda", EXIT_USAGE)
    try:
        install_engine(name, "cpu" if cpu else "cuda", say=lambda text: typer.echo(text, err=True))
    except InstallError as failure:
        raise fail(str(failure), failure.hint, EXIT_OTHER) from failure


@app.command("list")
def list_engines(*, as_json: AsJson = False) -> None:
    """List what is installed."""
    environments = [EngineEnvironment.of(name) for name in NAMES]
    found = [(environment, record) for environment in environments if (record := environment.read()) is not None]
    if as_json:
        engines = [
            {"name": environment.name, "variant": record.variant, "folder": str(environment.folder)}
            for environment, record in found
        ]
        print_json({"schema_version": SCHEMA_VERSION, "engines": engines})
        return
    print_table(
        ("engine", "variant", "folder"),
        [(environment.name, record.variant, str(environment.folder)) for environment, record in found],
    )
