"""The life of a worker process: start, announce, wait, drain, end.

The main thread does nothing but wait, so that signals are seen at once; calls into the core, which may take long, run
on a thread of their own.
"""

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import TypeVar

import kvist
from kvist import _core, errors, telemetry
from kvist.atomic_file import write_atomically
from kvist.core_telemetry import start_core_telemetry
from kvist.quick_end import skip_last_collection
from kvist_worker import engines
from kvist_worker.settings import WorkerSettings

_T = TypeVar("_T")
# Between two looks at whether the engine still lives.
_HEALTH_SECONDS = 0.25
_EXIT_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Stop:
    """The first signal asks for the end, a second one ends at once."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.is_started = False

    def install(self) -> None:
        for number in _EXIT_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.asked.is_set() or not self.is_started:
            # Nothing runs yet, or somebody insists.
            os._exit(128 + number)
        self.asked.set()


def run(settings: WorkerSettings, *, ready_path: Path | None) -> None:
    """Serves until SIGTERM or SIGINT, then drains and ends.

    Raises:
        KvistError: The engine or the server cannot start.
    """
    skip_last_collection()
    stop = _Stop()
    stop.install()
    log = telemetry.logger("kvist_worker")
    start_core_telemetry(settings.telemetry, service="kvist-worker", instance=settings.worker_uid)
    runtime = _core.Runtime(settings.runtime_threads)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="core") as calls:

            def call(function: Callable[[], _T]) -> _T:
                return calls.submit(function).result()

            with errors.core_errors():
                # Before an engine is loaded, which takes minutes.
                _core.check_machine(settings.core_json())
                engine = call(
                    lambda: engines.create(
                        settings.engine, settings.engine_arguments, settings.hand_over, is_prefill=settings.is_prefill
                    )
                )
                server = _core.WorkerServer(runtime, settings.core_json(), engine)
                addresses = json.loads(call(server.start))
            stop.is_started = True
            if ready_path is not None:
                _announce(ready_path, addresses)
            log.info("listening", worker_uid=settings.worker_uid, engine=settings.engine, **addresses)
            while not stop.asked.wait(_HEALTH_SECONDS):
                if server.has_failed():
                    # Whoever waits has been told. An engine does not come back by itself: the agent starts another.
                    call(server.stop)
                    raise errors.error("ENGINE_FAILED", "the engine has failed")
            log.info("draining", time_limit_ms=settings.drain_time_limit_ms)
            with errors.core_errors():
                finished, aborted = call(lambda: server.drain(settings.drain_time_limit_ms))
                call(server.stop)
            log.info("stopped", finished_requests=finished, aborted_requests=aborted)
    finally:
        runtime.close()
        _core.shutdown_telemetry()


def _announce(path: Path, addresses: dict[str, object]) -> None:
    record = {"event": "listening", **addresses, "process_id": os.getpid(), "version": kvist.__version__}
    write_atomically(path, json.dumps(record) + "\n")
