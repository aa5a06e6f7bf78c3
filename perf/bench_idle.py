"""Open streams on which nothing is said: how many hold, and what memory they take. `./task bench:idle -- --help`."""

import argparse
import asyncio
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from perf.load import drive, request_bytes
from perf.machine_facts import build_facts, machine_facts
from perf.mesh import Mesh, running_mesh
from perf.placement import Placement, placement, usable_cores
from perf.results import FAILURES, path_of, publish, run, say_why
from perf.sse import WrongAnswerError

BENCHMARK = "bench-idle"
IDLE_MODEL = "idle"
# Behind the same router, to see that it answers others meanwhile.
QUICK_MODEL = "quick"
QUICK_TOKENS = 4
STREAMS = 10_000
QUICK_STREAMS = 500
HOLD_SECONDS = 30.0
QUICK_HOLD_SECONDS = 12.0
# Sockets that are being opened at once.
OPENING = 128
HEADS_TIME_LIMIT_SECONDS = 120.0
POLL_SECONDS = 0.25
# Of the client and of the router beside the streams: logs, NATS, workers, the interpreter.
OTHER_FILES = 200
# Long after the benchmark: what runs says one token and is silent.
SILENT_STEP_MS = 3_600_000.0
ENGINE_ARGUMENTS = {
    "prefill_tokens_per_second": 0.0,
    "decode_step_per_request_ms": 0.0,
    "blocks": 65_536,
    "max_waiting": 100_000,
}


class IdleStream(asyncio.Protocol):
    """One open answer, of which only the length and the end are kept."""

    def __init__(self, request: bytes) -> None:
        """Asks as soon as it is connected."""
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self.received_bytes = 0
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asks."""
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
            transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Counts."""
        if len(self._head) < len(b"HTTP/1.1 200"):
            self._head += data
        self.received_bytes += len(data)

    def connection_lost(self, _error: Exception | None) -> None:
        """Notes."""
        self.is_lost = True

    @property
    def is_open(self) -> bool:
        """Whether an answer has begun and goes on."""
        return self._head.startswith(b"HTTP/1.1 200") and not self.is_lost

    def close(self) -> None:
        """Leaves."""
        if self._transport is not None:
            self._transport.close()


def files_allowed() -> int:
    """Open files that each process may have, after asking for as many as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


async def open_streams(address: str, count: int) -> list[IdleStream]:
    """Opens so many streams and waits until each has begun.

    Raises:
        WrongAnswerError: Not all of them have in time.
    """
    host, _, port = address.rpartition(":")
    request = request_bytes(address, model=IDLE_MODEL, system="to", question="wait", max_tokens=8)
    loop = asyncio.get_running_loop()
    opening = asyncio.Semaphore(OPENING)

    async def open_one() -> IdleStream:
        async with opening:
            _, stream = await loop.create_connection(lambda: IdleStream(request), host, int(port))
            return stream

    streams = await asyncio.gather(*(open_one() for _ in range(count)))
    deadline = time.perf_counter() + HEADS_TIME_LIMIT_SECONDS
    while not all(stream.is_open for stream in streams):
        if time.perf_counter() > deadline:
            have_begun = sum(stream.is_open for stream in streams)
            raise WrongAnswerError(f"{have_begun} of {count} streams have begun")
        await asyncio.sleep(POLL_SECONDS)
    return list(streams)


async def others_are_answered(address: str) -> None:
    """Sees to it that the router answers what is not idle.

    Raises:
        WrongAnswerError: It does not.
    """
    request = request_bytes(address, model=QUICK_MODEL, system="to", question="be quick", max_tokens=QUICK_TOKENS)
    samples = await drive(address, iter([request] * 20), concurrency=2)
    if any(sample.answer.completion_tokens != QUICK_TOKENS for sample in samples):
        raise WrongAnswerError("an answer beside the idle streams is not whole")


def resident_bytes(mesh: Mesh) -> tuple[int, int]:
    """Memory of the router, and of all workers."""
    return mesh.router.resident_bytes(), sum(
        worker.resident_bytes() for workers in mesh.workers.values() for worker in workers
    )


async def until_closed(mesh: Mesh, open_files: int) -> None:
    """Waits until the router has no more files open than before the streams."""
    async with asyncio.timeout(HEADS_TIME_LIMIT_SECONDS):
        while True:
            if psutil.Process(mesh.router.process_id).num_fds() <= open_files:
                return
            await asyncio.sleep(POLL_SECONDS)


async def measure(count: int, *, hold_seconds: float, cores: Placement, log: Console) -> dict[str, Any]:
    """Opens, holds, counts, closes."""
    os.sched_setaffinity(0, cores.others)
    models = {
        IDLE_MODEL: ENGINE_ARGUMENTS | {"decode_step_ms": SILENT_STEP_MS, "max_running": 1},
        QUICK_MODEL: ENGINE_ARGUMENTS | {"decode_step_ms": 1.0},
    }
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as folder:
        async with running_mesh(models, folder=Path(folder), cores=cores) as mesh:
            await others_are_answered(mesh.http_address)
            router_before, workers_before = resident_bytes(mesh)
            files_before = psutil.Process(mesh.router.process_id).num_fds()
            log.print(f"opening {count:,} streams", style="dim")
            began = time.perf_counter()
            streams = await open_streams(mesh.http_address, count)
            opened_after = time.perf_counter() - began
            received_before = [stream.received_bytes for stream in streams]
            cpu_before = mesh.router.cpu_seconds()
            log.print(f"holding them for {hold_seconds:g} s", style="dim")
            await asyncio.sleep(hold_seconds)
            cpu = mesh.router.cpu_seconds() - cpu_before
            router_open, workers_open = resident_bytes(mesh)
            held = sum(stream.is_open for stream in streams)
            kept_alive = told(streams, received_before)
            await others_are_answered(mesh.http_address)
            mesh.check()
            for stream in streams:
                stream.close()
            await until_closed(mesh, files_before)
            await others_are_answered(mesh.http_address)
            router_after, _ = resident_bytes(mesh)
    return {
        "streams": count,
        "held_streams": held,
        "streams_with_keep_alive": kept_alive,
        "seconds_to_open": round(opened_after, 2),
        "held_seconds": hold_seconds,
        "router_cpu_share_while_idle": round(cpu / hold_seconds, 4),
        "router_resident_mebibytes": {
            "before": round(router_before / 1024**2, 1),
            "open": round(router_open / 1024**2, 1),
            "after": round(router_after / 1024**2, 1),
        },
        "router_bytes_per_stream": round((router_open - router_before) / count),
        "workers_bytes_per_stream": round((workers_open - workers_before) / count),
    }


def told(streams: Sequence[IdleStream], before: Sequence[int]) -> int:
    """Streams that got something while they were idle: a comment that keeps proxies awake."""
    return sum(stream.received_bytes > earlier for stream, earlier in zip(streams, before, strict=True))


def table_of(result: dict[str, Any]) -> Table:
    """The same for people."""
    table = Table(title=f"{result['streams']:,} idle streams: {result['limited_by']}", title_justify="left")
    for heading in ("held", "kept alive", "opened in s", "router CPU", "MiB before, open, after", "router B/stream"):
        table.add_column(heading, justify="right")
    memory = result["router_resident_mebibytes"]
    table.add_row(
        f"{result['held_streams']:,}",
        f"{result['streams_with_keep_alive']:,}",
        f"{result['seconds_to_open']:.1f}",
        f"{result['router_cpu_share_while_idle']:.1%}",
        f"{memory['before']:.0f}, {memory['open']:.0f}, {memory['after']:.0f}",
        f"{result['router_bytes_per_stream']:,}",
    )
    return table


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="./task bench:idle --", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STREAMS} streams; keeps no result")
    parser.add_argument("--streams", type=int, help=f"how many (default: {STREAMS:,})")
    parser.add_argument("--output", type=Path, help=f"where the result is kept (default: results/{BENCHMARK}.json)")
    return parser.parse_args()


def main() -> int:
    """Measures, prints and keeps. Returns 1 when a stream was lost, 2 when nothing could be measured."""
    flags = arguments()
    log = Console(stderr=True)
    cores = placement(usable_cores())
    wanted = flags.streams or (QUICK_STREAMS if flags.quick else STREAMS)
    allowed = files_allowed()
    count = min(wanted, allowed - OTHER_FILES)
    try:
        facts = {"build": build_facts(), "machine": machine_facts() | {"files_of_a_process": allowed}}
        hold = QUICK_HOLD_SECONDS if flags.quick else HOLD_SECONDS
        figures = asyncio.run(measure(count, hold_seconds=hold, cores=cores, log=log))
    except FAILURES as failure:
        return say_why(failure, task="bench:idle", log=log)
    facts["machine"]["load_average_after"] = [round(value, 2) for value in os.getloadavg()]
    result = {
        "benchmark": BENCHMARK,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "limited_by": "as many as asked for" if count == wanted else f"`ulimit -n` is {allowed}",
        "are_limits_met": figures["held_streams"] == figures["streams"],
        **figures,
        **facts,
    }
    path = path_of(BENCHMARK, flags.output, is_partial=bool(flags.quick or flags.streams))
    return publish(result, table_of(result), path=path, width=120)


if __name__ == "__main__":
    run(main)
