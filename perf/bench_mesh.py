"""Requests/s and router CPU per request through a simulated worker. `./task bench:mesh -- --help` names the flags."""

import argparse
import asyncio
import itertools
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from perf.load import Sample, drive, request_bytes
from perf.machine_facts import build_facts, machine_facts
from perf.mesh import Mesh, running_mesh
from perf.placement import Placement, placement, usable_cores
from perf.results import FAILURES, path_of, publish, run, say_why
from perf.sse import WrongAnswerError
from perf.summary import percentile, spreads

BENCHMARK = "bench-mesh"
CONCURRENCY = 32
REPETITIONS = 5
QUICK_REPETITIONS = 3
QUICK_SHARE = 0.25
# What a router still writes when its client has the answer: the request's log line, metrics, the reservation's end.
SETTLE_SECONDS = 0.05

# Both engines compute nothing. `sim` steps as fast as its clock goes, so that the router, the client and the machine
# are the limit; `sim-paced` steps like a GPU does, so that each token of each request is a wake-up and a write.
MODELS = {
    "sim": {"decode_step_ms": 1.0, "decode_step_per_request_ms": 0.0},
    "sim-paced": {"decode_step_ms": 8.0, "decode_step_per_request_ms": 0.0},
}
ENGINE_ARGUMENTS = {
    "prefill_tokens_per_second": 0.0,
    "blocks": 65_536,
    "max_running": 64,
    "prefill_chunk_tokens": 1_048_576,
}
# Words that the simulated engine's tokenizer knows as one token each.
WORDS = ("to", "of", "in", "is", "it", "we", "he", "as", "on", "at", "by", "or", "an", "so", "us", "my")
TEMPLATE_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of load.

    Attributes:
        name: Name in the table.
        model: Which engine.
        prompt_tokens: Length of the prompt, roughly; half of it is the same in all requests.
        max_tokens: Length of the answer.
        requests: Requests of one repetition.
        limit_microseconds: Most CPU time of the router for each request; none for no limit.
    """

    name: str
    model: str
    prompt_tokens: int
    max_tokens: int
    requests: int
    limit_microseconds: float | None = None


ROWS = (
    Row("1 token", "sim", 256, 1, 2400, 700.0),
    Row("64 tokens", "sim", 256, 64, 960, 1500.0),
    Row("256 tokens", "sim", 256, 256, 320, 3500.0),
    Row("64 tokens, paced", "sim-paced", 256, 64, 480),
    Row("256 tokens, paced", "sim-paced", 256, 256, 128),
    Row("64 tokens, long prompt", "sim", 8000, 64, 320),
)


def requests_of(row: Row, address: str, count: int, *, seed: str) -> Iterator[bytes]:
    """Requests whose prompts share their first half, as those of one application do."""
    words = (row.prompt_tokens - TEMPLATE_TOKENS) // 2
    system = " ".join(random.Random(row.prompt_tokens).choices(WORDS, k=words))
    # Of the row as well: what another row has asked would be in the cache.
    chance = random.Random(f"{row.name} {seed}")
    for _ in range(count):
        question = " ".join(chance.choices(WORDS, k=words))
        yield request_bytes(address, model=row.model, system=system, question=question, max_tokens=row.max_tokens)


def check(row: Row, samples: Sequence[Sample], *, count: int) -> None:
    """Sees to it that each request was answered, in full.

    Raises:
        WrongAnswerError: One was not.
    """
    if len(samples) != count:
        raise WrongAnswerError(f"{row.name}: {len(samples)} of {count} requests were answered")
    for sample in samples:
        answer = sample.answer
        is_prompt_right = abs(answer.prompt_tokens - row.prompt_tokens) <= TEMPLATE_TOKENS
        if answer.completion_tokens != row.max_tokens or answer.finish_reason != "length" or not is_prompt_right:
            raise WrongAnswerError(f"{row.name}: {answer}")
        if not 1 <= answer.events <= row.max_tokens:
            raise WrongAnswerError(f"{row.name}: {answer.events} events for {row.max_tokens} tokens")


async def measure(mesh: Mesh, row: Row, *, concurrency: int, share: float, repetition: int) -> dict[str, float]:
    """One repetition of a row: warm-up, then a fixed number of requests from the first to the last."""
    address = mesh.http_address
    warm_up = max(concurrency, int(row.requests * share / 4))
    samples = await drive(
        address, requests_of(row, address, warm_up, seed=f"warm-up {repetition}"), concurrency=concurrency
    )
    check(row, samples, count=warm_up)
    count = max(concurrency, int(row.requests * share))
    # Made beforehand: a client that is busy with random numbers is slower than what it measures.
    requests = list(requests_of(row, address, count, seed=str(repetition)))
    await asyncio.sleep(SETTLE_SECONDS)
    (worker,) = mesh.workers[row.model]
    router_before, worker_before, client_before = mesh.router.cpu_seconds(), worker.cpu_seconds(), time.process_time()
    samples = await drive(address, iter(requests), concurrency=concurrency)
    seconds = max(sample.ended_at for sample in samples) - min(sample.began_at for sample in samples)
    client_seconds = time.process_time() - client_before
    await asyncio.sleep(SETTLE_SECONDS)
    router_seconds = mesh.router.cpu_seconds() - router_before
    worker_seconds = worker.cpu_seconds() - worker_before
    mesh.check()
    check(row, samples, count=count)
    first = [(sample.first_text_at - sample.began_at) * 1000 for sample in samples]
    total = [(sample.ended_at - sample.began_at) * 1000 for sample in samples]
    return {
        "requests_per_second": count / seconds,
        "router_cpu_microseconds": router_seconds / count * 1e6,
        "worker_cpu_microseconds": worker_seconds / count * 1e6,
        "router_cpu_cores": router_seconds / seconds,
        "client_cpu_cores": client_seconds / seconds,
        "events_per_request": sum(sample.answer.events for sample in samples) / count,
        "cached_prompt_share": sum(sample.answer.cached_tokens for sample in samples)
        / sum(sample.answer.prompt_tokens for sample in samples),
        "first_token_p50_ms": percentile(first, 50),
        "first_token_p99_ms": percentile(first, 99),
        "total_p50_ms": percentile(total, 50),
        "total_p99_ms": percentile(total, 99),
        "router_resident_mebibytes": mesh.router.resident_bytes() / 1024**2,
        "worker_resident_mebibytes": worker.resident_bytes() / 1024**2,
    }


async def measure_all(
    rows: Sequence[Row], *, repetitions: int, concurrency: int, share: float, cores: Placement, log: Console
) -> Any:
    """All rows, interleaved, so that what the machine does meanwhile meets all of them."""
    # Inherited by all processes but the router, which gets its own.
    os.sched_setaffinity(0, cores.others)
    figures: dict[str, list[dict[str, float]]] = {row.name: [] for row in rows}
    models = {model: ENGINE_ARGUMENTS | arguments for model, arguments in MODELS.items()}
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as folder:
        async with running_mesh(models, folder=Path(folder), cores=cores) as mesh:
            for repetition, row in itertools.product(range(repetitions), rows):
                log.print(f"repetition {repetition + 1} of {repetitions}: {row.name}", style="dim")
                found = await measure(mesh, row, concurrency=concurrency, share=share, repetition=repetition)
                figures[row.name].append(found)
    return figures


def result_of(
    rows: Sequence[Row], figures: dict[str, list[dict[str, float]]], *, concurrency: int, facts: dict[str, Any]
) -> dict[str, Any]:
    """What the RESULT line says."""
    results = []
    for row in rows:
        found = spreads(figures[row.name], digits=3)
        entry = asdict(row) | {"repetitions": len(figures[row.name]), "figures": found}
        if row.limit_microseconds is not None:
            entry["is_within_limit"] = found["router_cpu_microseconds"]["median"] < row.limit_microseconds
        results.append(entry)
    return {
        "benchmark": BENCHMARK,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "concurrency": concurrency,
        "are_limits_met": all(entry.get("is_within_limit", True) for entry in results),
        "rows": results,
        **facts,
    }


def table_of(result: dict[str, Any]) -> Table:
    """The same for people."""
    table = Table(title=f"mesh at concurrency {result['concurrency']}: median (least to most)", title_justify="left")
    table.add_column("answer")
    for heading in ("requests/s", "router CPU µs", "limit µs", "worker CPU µs", "events", "first token ms", "total ms"):
        table.add_column(heading, justify="right")
    table.add_column("router MiB", justify="right")
    for row in result["rows"]:
        figures = row["figures"]
        cpu = figures["router_cpu_microseconds"]
        limit = "" if row["limit_microseconds"] is None else f"{row['limit_microseconds']:,.0f}"
        verdict = {True: " ok", False: " OVER"}.get(row.get("is_within_limit"), "")
        table.add_row(
            row["name"],
            f"{figures['requests_per_second']['median']:,.0f}",
            f"{cpu['median']:,.0f} ({cpu['least']:,.0f} to {cpu['most']:,.0f})",
            limit + verdict,
            f"{figures['worker_cpu_microseconds']['median']:,.0f}",
            f"{figures['events_per_request']['median']:,.0f}",
            f"{figures['first_token_p50_ms']['median']:.1f} / {figures['first_token_p99_ms']['median']:.1f}",
            f"{figures['total_p50_ms']['median']:.1f} / {figures['total_p99_ms']['median']:.1f}",
            f"{figures['router_resident_mebibytes']['median']:.0f}",
        )
    return table


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="./task bench:mesh --", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer requests and repetitions; keeps no result")
    parser.add_argument("--repetitions", type=int, help=f"repetitions of each row (default: {REPETITIONS})")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY, help="requests at once (default: %(default)s)")
    parser.add_argument("--shared-cores", action="store_true", help="let the router share its cores; keeps no result")
    parser.add_argument("--only", metavar="TEXT", default="", help="only rows whose name holds this; keeps no result")
    parser.add_argument("--output", type=Path, help=f"where the result is kept (default: results/{BENCHMARK}.json)")
    return parser.parse_args()


def main() -> int:
    """Measures, prints and keeps. Returns 1 when a limit is not met, 2 when nothing could be measured."""
    flags = arguments()
    log = Console(stderr=True)
    rows = [row for row in ROWS if flags.only in f"{row.name} {row.model}."]
    repetitions = flags.repetitions or (QUICK_REPETITIONS if flags.quick else REPETITIONS)
    cores = placement(usable_cores(), is_shared=flags.shared_cores)
    try:
        facts = {
            "build": build_facts(),
            "machine": machine_facts()
            | {"router_cores": len(cores.router), "are_cores_shared": cores.router == cores.others},
        }
        figures = asyncio.run(
            measure_all(
                rows,
                repetitions=repetitions,
                concurrency=flags.concurrency,
                share=QUICK_SHARE if flags.quick else 1.0,
                cores=cores,
                log=log,
            )
        )
    except FAILURES as failure:
        return say_why(failure, task="bench:mesh", log=log)
    result = result_of(rows, figures, concurrency=flags.concurrency, facts=facts)
    path = path_of(BENCHMARK, flags.output, is_partial=bool(flags.quick or flags.only or flags.shared_cores))
    return publish(result, table_of(result), path=path)


if __name__ == "__main__":
    run(main)
