"""`kvist router serve` and its like: start one process in the foreground."""

from __future__ import annotations

import importlib.util
import os
import sys

import typer

from kvist.cli.connection import EXIT_USAGE, fail

SERVICES = {
    "router": "Routes requests: HTTP edge and gRPC.",
    "controller": "What should run, and what exists.",
    "kvmaster": "The cluster-wide index as a service.",
    "agent": "One node: its workers and their events.",
    "worker": "One engine and its ledger.",
}


def module_of(service: str) -> str:
    """The Python module of a process; ends the command when it is not installed."""
    if service not in SERVICES:
        raise fail(f"there is no process {service!r}", f"one of {', '.join(SERVICES)}", EXIT_USAGE)
    module = f"kvist_{service}"
    if importlib.util.find_spec(module) is None:
        raise fail(f"the {service} is not installed here", f"pip install kvist-{service}", EXIT_USAGE)
    return module


def starter(service: str) -> typer.Typer:
    """The commands of one process."""
    app = typer.Typer(no_args_is_help=True, help=SERVICES[service])

    @app.callback()
    def group() -> None:
        """Start this process."""

    @app.command(
        help=f"Run the {service} in the foreground; `kvist {service} serve -- --help` lists its flags.",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def serve(context: typer.Context) -> None:
        module = module_of(service)
        # The process takes the command's place, so that signals reach it.
        os.execv(sys.executable, [sys.executable, "-m", module, *context.args])  # noqa: S606

    return app
