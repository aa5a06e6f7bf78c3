"""The root of the `kvist` command: puts the commands together."""

from __future__ import annotations

import typer

import kvist
from kvist import _core, telemetry
from kvist.cli import (
    certs,
    cluster,
    config,
    connection,
    doctor,
    engine,
    generation,
    kv,
    nats,
    resources,
    route,
    services,
    store,
    twin,
)
from kvist.settings import TelemetrySettings

app = typer.Typer(no_args_is_help=True, help="Kvist: a gRPC mesh that serves language models.", add_completion=True)

app.command("up", rich_help_panel="Embedded cluster")(cluster.up)
app.command("down", rich_help_panel="Embedded cluster")(cluster.down)
app.command("status", rich_help_panel="Embedded cluster")(cluster.status)
app.command("doctor", rich_help_panel="Embedded cluster")(doctor.doctor)
app.command("chat", rich_help_panel="Models")(generation.chat)
app.command("apply", rich_help_panel="Resources")(resources.apply)
app.command("get", rich_help_panel="Resources")(resources.get)
app.command("describe", rich_help_panel="Resources")(resources.describe)
app.command("delete", rich_help_panel="Resources")(resources.delete)
app.add_typer(route.app, name="route", rich_help_panel="Routing")
app.add_typer(kv.app, name="kv", rich_help_panel="Routing")
app.add_typer(twin.app, name="twin", rich_help_panel="Routing")
app.add_typer(engine.app, name="engine", rich_help_panel="Models")
app.add_typer(config.app, name="config", rich_help_panel="Processes")
app.add_typer(store.app, name="store", rich_help_panel="Processes")
app.add_typer(certs.app, name="certs", rich_help_panel="Security")
app.add_typer(nats.app, name="nats", rich_help_panel="Security")
app.callback()(connection.choose_tls)
for service in services.SERVICES:
    app.add_typer(services.starter(service), name=service, rich_help_panel="Processes")


@app.command(rich_help_panel="Processes")
def version() -> None:
    """Print the versions."""
    typer.echo(f"kvist {kvist.__version__} (core {_core.__version__})")


def main() -> None:
    """Runs the command. Standard output is for answers: what libraries log goes to stderr, warnings and worse."""
    # Processes set their own logging up once they know their settings.
    telemetry.configure_logging(TelemetrySettings(log_level="warning", log_format="console"), service="kvist")
    app()
