"""How commands print: tables for people, JSON and YAML for programs."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# A table that is piped is cut by nobody.
PIPED_WIDTH_COLUMNS = 240


class Output(enum.StrEnum):
    """Forms of what a command prints."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="table, json, yaml or name")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def console() -> Console:
    """Stdout; as wide as needed when nobody looks at it."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=PIPED_WIDTH_COLUMNS)


def print_json(value: Any) -> None:
    """Prints JSON with stable keys."""
    typer.echo(json.dumps(value, indent=2))


def print_yaml(value: Any) -> None:
    """Prints YAML in the order of the value."""
    typer.echo(yaml.safe_dump(value, sort_keys=False, allow_unicode=True).rstrip())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table without frames, so that it can be piped."""
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        # Text: what servers say is not markup.
        table.add_row(*(Text(cell) for cell in row))
    console().print(table)
