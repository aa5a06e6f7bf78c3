"""`kvist nats`: configuration of the bus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvist.cli.certs import need_cryptography
from kvist.cli.connection import EXIT_USAGE, fail
from kvist.errors import KvistError

app = typer.Typer(no_args_is_help=True, help="Configuration of the bus.")


@app.callback()
def group() -> None:
    """Configuration of the bus."""


@app.command()
def config(
    folder: Annotated[Path, typer.Argument(help="folder for the configuration and the credentials")],
    *,
    cluster: Annotated[str, typer.Option(help="name of the cluster")] = "default",
    tls_certificate_file: Annotated[Path | None, typer.Option(help="PEM chain of the NATS server")] = None,
    tls_key_file: Annotated[Path | None, typer.Option(help="PEM key of that certificate")] = None,
    renew: Annotated[bool, typer.Option("--renew", help="make the credentials of all roles anew")] = False,
) -> None:
    """Write NATS configuration with one user for each role, each with its subjects alone.

    Start the server with `nats-server --config FOLDER/nats.conf`, or include the file in its own configuration; name
    FOLDER/ROLE.creds as bus.credentials_file of the role's processes.
    """
    need_cryptography()
    from kvist.nats_accounts import NatsFolder  # noqa: PLC0415  Of an extra.

    if (tls_certificate_file is None) != (tls_key_file is None):
        raise fail("--tls-certificate-file and --tls-key-file go together", "", EXIT_USAGE)
    tls = None
    if tls_certificate_file is not None and tls_key_file is not None:
        tls = (tls_certificate_file, tls_key_file)
    try:
        written = NatsFolder(folder).write(cluster=cluster, tls=tls, renew=renew)
    except (KvistError, ValueError) as failure:
        raise fail(str(failure), "remove the folder to begin again with new keys", EXIT_USAGE) from failure
    typer.echo(f"written in {folder}: {', '.join(written)}")
