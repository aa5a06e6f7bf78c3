"""The end of a benchmark: what it prints, keeps and returns."""

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from perf.machine_facts import ROOT, DevelopmentBuildError
from perf.processes import ProcessFailedError
from perf.sse import WrongAnswerError

FAILURES = (DevelopmentBuildError, ProcessFailedError, WrongAnswerError, TimeoutError)
"""Why nothing could be measured."""


def path_of(benchmark: str, asked: Path | None, *, is_partial: bool) -> Path | None:
    """Where a result is kept: where it was asked for, else in `results/` if it is a whole one."""
    return asked or (None if is_partial else ROOT / "results" / f"{benchmark}.json")


def publish(result: Mapping[str, Any], table: Table, *, path: Path | None, width: int = 160) -> int:
    """Prints the table and the RESULT line, and keeps the result. Returns 1 when a limit is not met."""
    Console(width=None if sys.stdout.isatty() else width).print(table)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"RESULT {json.dumps(result)}")
    return 0 if result.get("are_limits_met", True) else 1


def say_why(failure: Exception, *, task: str, log: Console) -> int:
    """Says why nothing could be measured. Returns 2."""
    if isinstance(failure, DevelopmentBuildError):
        log.print(f"bench: {failure} is a development build\nhint: run ./task {task}, which makes a release build")
    else:
        log.print(f"bench: {type(failure).__name__}: {failure}", markup=False)
    return 2


def run(main: Callable[[], int]) -> NoReturn:
    """Runs a benchmark. However it is ended, it ends its children."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
