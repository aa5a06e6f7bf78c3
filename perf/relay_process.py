"""The KV event relay of a node as a process of its own, in the place of an agent.

`python -m perf.relay_process SETTINGS_JSON WORKERS_JSON READY_FILE` runs until SIGTERM or SIGINT.
"""

import json
import signal
import sys
import time
from pathlib import Path

from kvist import _core
from kvist.atomic_file import write_atomically

POLL_SECONDS = 0.02


def main() -> None:
    """Relays the events of the workers it was given."""
    settings_json, workers_json, ready_file = sys.argv[1:]
    stop_signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
    runtime = _core.Runtime(1)
    relay = _core.Relay(runtime, settings_json)
    relay.start()
    relay.set_workers(workers_json)
    while not all(worker["connected"] for worker in json.loads(relay.stats())["workers"].values()):
        time.sleep(POLL_SECONDS)
    write_atomically(Path(ready_file), relay.stats())
    signal.sigwait(stop_signals)
    relay.stop()
    runtime.close()


if __name__ == "__main__":
    main()
