"""Runs one router: `python -m kvist_router --name r --cluster-file PATH --ready-file PATH`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvist import _core
from kvist.process import ReadyFile, wait_for_signal

from kvist_router.cluster_file import ClusterFile


def main() -> int:
    """Serves until SIGTERM or SIGINT, then drains; returns the exit code."""
    parser = argparse.ArgumentParser(prog="kvist_router", description=__doc__)
    parser.add_argument("--name", required=True, help="name of the router; part of request ids")
    parser.add_argument("--http-listen", default="127.0.0.1:8000", help="host:port of the HTTP edge")
    parser.add_argument("--grpc-listen", default="127.0.0.1:7000", help="host:port of the gRPC server")
    parser.add_argument("--cluster-file", type=Path, required=True, help="cluster state as protobuf JSON; watched")
    parser.add_argument("--body-limit-bytes", type=int, default=64 * 1024 * 1024)
    parser.add_argument("--index-byte-budget", type=int, default=1024**3)
    parser.add_argument("--default-deadline-ms", type=int, default=600_000)
    parser.add_argument("--drain-ms", type=int, default=5_000, help="how long running requests may take at the end")
    parser.add_argument("--worker-threads", type=int, default=2, help="threads of the data plane")
    parser.add_argument("--ready-file", type=Path, help="written when the router listens")
    arguments = parser.parse_args()
    runtime = _core.Runtime(worker_threads=arguments.worker_threads)
    try:
        router = _core.RouterServer(
            runtime,
            name=arguments.name,
            http_listen=arguments.http_listen,
            grpc_listen=arguments.grpc_listen,
            body_limit_bytes=arguments.body_limit_bytes,
            index_byte_budget=arguments.index_byte_budget,
            default_deadline_ms=arguments.default_deadline_ms,
        )
    except _core.CoreError as error:
        sys.stderr.write(f"kvist_router: {error.args[1]}\n")
        return 2
    try:
        http, grpc = router.addresses
        cluster_file = ClusterFile(arguments.cluster_file)
        cluster_file.apply_if_changed(router.apply_cluster_state)
        ReadyFile(arguments.ready_file).write({"http": http, "grpc": grpc})
        while not wait_for_signal(time_limit_seconds=ClusterFile.POLL_SECONDS):
            cluster_file.apply_if_changed(router.apply_cluster_state)
        router.stop(arguments.drain_ms)
    finally:
        del router
        runtime.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
