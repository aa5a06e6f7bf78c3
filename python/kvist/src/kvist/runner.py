"""The life of a service process: flags, settings, logs, the ready file, signals, exit codes.

A service's `__main__` is one call of `run`. The main coroutine gets a `Process`; it announces its addresses when it
listens, and returns when `stopping` is set.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import kvist
from kvist import settings as settings_module
from kvist import telemetry
from kvist.atomic_file import write_atomically
from kvist.quick_end import skip_last_collection
from kvist.readiness import Readiness
from kvist.settings import Loaded, Settings, SettingsError, TelemetrySettings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

_S = TypeVar("_S", bound=Settings)


@dataclass
class Process(Generic[_S]):
    """What a service's main coroutine works with.

    Attributes:
        service: Its name in logs and metrics.
        settings: The checked settings.
        readiness: Conditions of `/readyz`.
        ready_path: File for the addresses; none when nobody asked.
        stopping: Set by SIGTERM and SIGINT.
    """

    service: str
    settings: _S
    readiness: Readiness
    ready_path: Path | None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @cached_property
    def registry(self) -> CollectorRegistry:
        """Metrics of the process."""
        # Imported here: a router's metrics are those of its data plane, and it does without.
        from kvist.metrics import new_registry  # noqa: PLC0415

        return new_registry(service=self.service)

    def announce(self, **addresses: object) -> None:
        """Writes the addresses for whoever started the process, and logs them."""
        record = {"event": "listening", **addresses, "process_id": os.getpid()}
        if self.ready_path is not None:
            write_atomically(self.ready_path, json.dumps(record) + "\n")
        telemetry.logger("kvist").info("listening", **addresses)


def run(
    service: str,
    model: type[_S],
    main: Callable[[Process[_S]], Awaitable[None]],
    *,
    arguments: Sequence[str] | None = None,
) -> int:
    """Runs a service to its end and returns the exit code.

    The settings class has a section `telemetry`. The second signal ends the process at once.
    """
    parser = argparse.ArgumentParser(prog=f"python -m kvist_{service}", description=f"Kvist's {service}.")
    parser.add_argument("--config", type=Path, default=os.environ.get("KVIST_CONFIG"), help="settings file (YAML)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="one setting, such as grpc.listen=:7000"
    )
    parser.add_argument("--ready-file", type=Path, help="file for the addresses, written when the process listens")
    parser.add_argument("--check-config", action="store_true", help="check the settings and end")
    parser.add_argument("--show-config", action="store_true", help="show each setting with its origin and end")
    parser.add_argument("--version", action="version", version=kvist.__version__)
    flags = parser.parse_args(arguments)
    pairs = [pair.partition("=") for pair in flags.set]
    try:
        loaded = settings_module.load(
            model,
            file=Path(flags.config) if flags.config else None,
            flags={path: value for path, _, value in pairs},
        )
    except SettingsError as failure:
        for problem in failure.problems:
            sys.stderr.write(f"{service}: {problem}\n")
        sys.stderr.write("hint: --show-config shows each setting and where it comes from\n")
        return EXIT_USAGE
    if flags.show_config:
        sys.stdout.writelines(f"{path}: {value}  # {origin}\n" for path, value, origin in loaded.lines())
    if flags.check_config or flags.show_config:
        return EXIT_OK
    return _serve(service, loaded, main, ready_path=flags.ready_file)


def _serve(
    service: str, loaded: Loaded[_S], main: Callable[[Process[_S]], Awaitable[None]], *, ready_path: Path | None
) -> int:
    skip_last_collection()
    section = getattr(loaded.settings, "telemetry", None)
    # Processes that are told apart by name have such a setting.
    instance = str(getattr(loaded.settings, "name", ""))
    telemetry.configure_logging(
        section if isinstance(section, TelemetrySettings) else TelemetrySettings(),
        service=f"kvist-{service}",
        instance=instance,
    )
    telemetry.start_tracing(service=f"kvist-{service}", instance=instance)
    log = telemetry.logger("kvist")
    process = Process(
        service=service,
        settings=loaded.settings,
        readiness=Readiness(start="starting"),
        ready_path=ready_path,
    )

    async def body() -> None:
        loop = asyncio.get_running_loop()

        def on_signal(number: signal.Signals) -> None:
            if process.stopping.is_set():
                os._exit(128 + number)
            log.info("stopping", signal=number.name)
            process.stopping.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        await main(process)

    try:
        asyncio.run(body())
    except Exception:
        log.exception("process_failed")
        return EXIT_FAILED
    finally:
        telemetry.stop_tracing()
    log.info("stopped")
    return EXIT_OK
