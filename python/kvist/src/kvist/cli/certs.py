"""`kvist certs`: certificates for development."""

from __future__ import annotations

import datetime as dt
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvist.cli.connection import EXIT_OTHER, EXIT_USAGE, fail
from kvist.cli.output import AsJson, print_json, print_table
from kvist.errors import KvistError

if TYPE_CHECKING:
    from kvist.certificates import CertificateFolder

SCHEMA_VERSION = 1

app = typer.Typer(no_args_is_help=True, help="Certificates for development.")

Folder = Annotated[Path, typer.Argument(help="folder of the authority and its certificates")]


@app.callback()
def group() -> None:
    """Certificates for development."""


@app.command()
def init(
    folder: Folder,
    *,
    host: Annotated[
        list[str] | None, typer.Option(help="name or address that servers are reached by; repeatable")
    ] = None,
    trust_domain: Annotated[str, typer.Option(help="trust domain of spiffe://DOMAIN/kvist/ROLE")] = "kvist.local",
    days: Annotated[int, typer.Option(min=1, max=3_650, help="days that the certificates hold")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="make the certificates of all roles anew")] = False,
) -> None:
    """Make an authority and a certificate for each role. What is there stays; an authority is never replaced."""
    try:
        made = _open(folder).init(hosts=host or (), trust_domain=trust_domain, days=days, renew=renew)
    except KvistError as failure:
        raise fail(failure.message, "remove the folder to begin again with a new authority", EXIT_USAGE) from failure
    typer.echo(f"made in {folder}: {', '.join(made)}" if made else f"everything is there already in {folder}")


@app.command()
def show(folder: Folder, *, as_json: AsJson = False) -> None:
    """Show the certificates of a folder. Exit code 1 when one has ended, or is not of the folder's authority."""
    now = dt.datetime.now(dt.UTC)
    try:
        seen = list(_open(folder).seen())
    except KvistError as failure:
        raise fail(failure.message, f"make them with `kvist certs init {folder}`", EXIT_USAGE) from failure
    if as_json:
        print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "certificates": [
                    {
                        "name": one.name,
                        "uris": list(one.uris),
                        "hosts": list(one.hosts),
                        "not_after": one.not_after.isoformat(),
                        "valid": one.is_valid(now),
                    }
                    for one in seen
                ],
            }
        )
    else:
        print_table(
            ("certificate", "role", "hosts", "ends", "valid"),
            [
                (
                    one.name,
                    " ".join(one.uris),
                    " ".join(one.hosts),
                    f"{one.not_after:%Y-%m-%d}",
                    "yes" if one.is_valid(now) else "NO",
                )
                for one in seen
            ],
        )
    if not all(one.is_valid(now) for one in seen):
        raise typer.Exit(EXIT_OTHER)


def _open(folder: Path) -> CertificateFolder:
    need_cryptography()
    from kvist.certificates import CertificateFolder  # noqa: PLC0415  Of an extra.

    return CertificateFolder(folder)


def need_cryptography() -> None:
    """Ends the command when the extra is not installed."""
    if importlib.util.find_spec("cryptography") is None:
        raise fail("making keys needs the package cryptography", "pip install 'kvist[certs]'", EXIT_USAGE)
