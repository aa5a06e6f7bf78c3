"""`kvist store`: moving a cluster's state, and saying that it came from a backup."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from pydantic import ValidationError

from kvist.cli.output import AsJson, print_json
from kvist.settings import EtcdSettings, StoreSettings
from kvist.state_store import open_store
from kvist.store import StoreError
from kvist.store.migrate import Migration, MigrationRefusedError
from kvist.store.migrate import migrate as migrate_store

app = typer.Typer(no_args_is_help=True, help="The state store of controllers.")

EXIT_FAILED = 1
EXIT_USAGE = 2
_T = TypeVar("_T")

Place = Annotated[str, typer.Argument(help="sqlite:PATH, or etcd:HOST:PORT[,HOST:PORT...]")]
Namespace = Annotated[str, typer.Option(help="namespace of etcd's keys, as store.etcd.namespace")]
CaFile = Annotated[Path | None, typer.Option(help="PEM of the authorities of etcd's certificates")]
CertificateFile = Annotated[Path | None, typer.Option(help="PEM of the client's certificate")]
KeyFile = Annotated[Path | None, typer.Option(help="PEM of its key")]
Username = Annotated[str, typer.Option(help="user of etcd")]
PasswordFile = Annotated[Path | None, typer.Option(help="file with the user's password")]
Insecure = Annotated[bool, typer.Option("--insecure", help="allow plain text off loopback")]


@app.callback()
def group() -> None:
    """The state store of controllers."""


@app.command()
def migrate(
    source: Place,
    target: Place,
    *,
    replace: Annotated[bool, typer.Option("--replace", help="the target may hold a state, which is lost")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would be done")] = False,
    namespace: Namespace = "",
    tls_ca_file: CaFile = None,
    tls_certificate_file: CertificateFile = None,
    tls_key_file: KeyFile = None,
    username: Username = "",
    password_file: PasswordFile = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Copy a cluster's state from one store to another; stop its controllers and KV masters first.

    Resources, nodes, worker slots, settings and named prefixes are copied; leases and elections are not. Running
    workers go on: controllers that start on the target find them again.
    """
    etcd = {
        "namespace": namespace,
        "tls_ca_file": tls_ca_file,
        "tls_certificate_file": tls_certificate_file,
        "tls_key_file": tls_key_file,
        "username": username,
        "password_file": password_file,
        "insecure": insecure,
    }
    settings = [_settings(place, etcd) for place in (source, target)]
    if source.startswith("sqlite:") and not settings[0].path.exists():
        _fail(f"there is no file {settings[0].path}", EXIT_USAGE)

    async def work() -> Migration:
        async with open_store(settings[0]) as old, open_store(settings[1]) as new:
            return await migrate_store(old, new, may_replace=replace, is_trial=dry_run)

    done = _run(work())
    if as_json:
        print_json({"copied": done.copied, "deleted": done.deleted, "left_out": done.left_out, "dry_run": dry_run})
        return
    verb = "would be copied" if dry_run else "copied"
    typer.echo(f"{done.copied} keys {verb}, {done.deleted} deleted in the target, {done.left_out} left out")


@app.command("declare-restored")
def declare_restored(
    place: Place,
    *,
    namespace: Namespace = "",
    tls_ca_file: CaFile = None,
    tls_certificate_file: CertificateFile = None,
    tls_key_file: KeyFile = None,
    username: Username = "",
    password_file: PasswordFile = None,
    insecure: Insecure = False,
) -> None:
    """Say that the store was restored from a backup: it begins a new epoch, and is not taken for an older state."""
    etcd = {
        "namespace": namespace,
        "tls_ca_file": tls_ca_file,
        "tls_certificate_file": tls_certificate_file,
        "tls_key_file": tls_key_file,
        "username": username,
        "password_file": password_file,
        "insecure": insecure,
    }
    settings = _settings(place, etcd)

    async def work() -> int:
        async with open_store(settings) as store:
            return await store.declare_restored()

    typer.echo(f"epoch {_run(work())}")


def _settings(place: str, etcd: dict[str, Any]) -> StoreSettings:
    kind, _, where = place.partition(":")
    try:
        match kind:
            case "sqlite" if where:
                return StoreSettings(kind="sqlite", path=Path(where))
            case "etcd" if where:
                endpoints = tuple(part.strip() for part in where.split(","))
                return StoreSettings(kind="etcd", etcd=EtcdSettings(endpoints=endpoints, **etcd))
            case _:
                _fail(f"{place!r} is neither sqlite:PATH nor etcd:HOST:PORT", EXIT_USAGE)
    except ValidationError as failure:
        _fail("; ".join(item["msg"].removeprefix("Value error, ") for item in failure.errors()), EXIT_USAGE)


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    try:
        return asyncio.run(work)
    except MigrationRefusedError as failure:
        _fail(str(failure), EXIT_FAILED)
    except StoreError as failure:
        _fail(f"the state store failed: {failure}", EXIT_FAILED)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"kvist store: {message}", err=True)
    raise typer.Exit(code)
