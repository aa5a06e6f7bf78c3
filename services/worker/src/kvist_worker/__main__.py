"""`python -m kvist_worker --settings-file FILE [--ready-file FILE]`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import kvist
from kvist import engines as engine_environments
from kvist import settings as settings_module
from kvist import telemetry
from kvist.errors import KvistError
from kvist.settings import SettingsError
from kvist_worker import app
from kvist_worker.settings import WorkerSettings

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a worker to its end and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvist_worker", description="Kvist's worker: one engine.")
    parser.add_argument("--settings-file", type=Path, required=True, help="settings, as JSON")
    parser.add_argument("--ready-file", type=Path, help="file for the addresses, written when the worker serves")
    parser.add_argument("--check", action="store_true", help="check the settings and end")
    parser.add_argument("--show-config", action="store_true", help="show each setting with its origin and end")
    parser.add_argument("--version", action="version", version=kvist.__version__)
    flags = parser.parse_args(arguments)
    try:
        # The environment is that of whoever starts workers; its variables are not meant for them.
        loaded = settings_module.load(WorkerSettings, file=flags.settings_file, environment={})
    except SettingsError as failure:
        for problem in failure.problems:
            sys.stderr.write(f"worker: {problem}\n")
        return EXIT_USAGE
    settings = loaded.settings
    if flags.show_config:
        sys.stdout.writelines(f"{path}: {value}  # {origin}\n" for path, value, origin in loaded.lines())
    if flags.check or flags.show_config:
        return EXIT_OK
    become_engines_python(settings.engine, sys.argv[1:] if arguments is None else arguments)
    telemetry.configure_logging(settings.telemetry, service="kvist-worker", instance=settings.worker_uid)
    log = telemetry.logger("kvist_worker")
    try:
        app.run(settings, ready_path=flags.ready_file)
    except KvistError as failure:
        log.error(  # noqa: TRY400  The message says it all; a traceback would hide it.
            "worker_failed",
            code=failure.code,
            reason=failure.message,
            fields=[f"{violation.field}: {violation.description}" for violation in failure.fields],
        )
        return EXIT_FAILED
    except Exception:
        log.exception("worker_failed")
        return EXIT_FAILED
    return EXIT_OK


def become_engines_python(engine: str, arguments: Sequence[str]) -> None:
    """Continues in the engine's own environment when it has one: same process, another Python."""
    environment = engine_environments.find(engine)
    # The prefix, since interpreters of environments are links to the same program.
    if environment is None or os.path.realpath(sys.prefix) == os.path.realpath(environment.folder):
        return
    python = str(environment.python)
    os.execv(python, [python, "-m", "kvist_worker", *arguments])  # noqa: S606


if __name__ == "__main__":
    sys.exit(main())
