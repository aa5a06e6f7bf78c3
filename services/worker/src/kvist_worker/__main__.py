"""Runs one worker: `python -m kvist_worker --uid w-0 --model sim --ready-file PATH`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvist import _core
from kvist.process import ReadyFile, wait_for_signal


def main() -> int:
    """Serves until SIGTERM or SIGINT, then drains; returns the exit code."""
    parser = argparse.ArgumentParser(prog="kvist_worker", description=__doc__)
    parser.add_argument("--uid", required=True, help="UID of the worker's slot")
    parser.add_argument("--model", required=True, help="name of the served model")
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port of the gRPC server")
    parser.add_argument("--hash-seed", type=int, default=0, help="seed of the cluster's block hashes")
    parser.add_argument("--incarnation-floor", type=int, default=0, help="the incarnation will be larger than this")
    parser.add_argument("--engine-arguments", default="{}", help="JSON object for the engine")
    parser.add_argument("--drain-ms", type=int, default=5_000, help="how long running requests may take at the end")
    parser.add_argument("--ready-file", type=Path, help="written when the worker listens")
    arguments = parser.parse_args()
    settings = {
        "worker_uid": arguments.uid,
        "model": arguments.model,
        "grpc_listen": arguments.listen,
        "hash_seed": arguments.hash_seed,
        "incarnation_floor": arguments.incarnation_floor,
    }
    runtime = _core.Runtime()
    try:
        worker = _core.WorkerServer(runtime, settings_json=json.dumps(settings), engine_json=arguments.engine_arguments)
    except (ValueError, _core.CoreError) as error:
        sys.stderr.write(f"kvist_worker: {' '.join(map(str, error.args))}\n")
        return 2
    try:
        address, incarnation = worker.address
        engine = {"blockSizeTokens": 32, **json.loads(arguments.engine_arguments)}
        ready = {"address": address, "incarnation": incarnation, "block_size_tokens": engine["blockSizeTokens"]}
        ReadyFile(arguments.ready_file).write(ready)
        wait_for_signal()
        worker.stop(arguments.drain_ms)
    finally:
        del worker
        runtime.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
