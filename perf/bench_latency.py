"""Latency that Kvist adds to an engine, at a steady rate and at the highest. `./task bench:latency -- --help`."""

import argparse
import asyncio
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from perf.load import Sample, request_bytes
from perf.machine_facts import ROOT, build_facts, machine_facts
from perf.mesh import running_mesh
from perf.pace import drive_at_pace
from perf.placement import Placement, placement, usable_cores
from perf.processes import Process
from perf.results import FAILURES, path_of, publish, run, say_why
from perf.sse import WrongAnswerError
from perf.summary import percentile, spreads

BENCHMARK = "bench-latency"
MODEL = "quick"
ENGINES = 2
RATE_PER_SECOND = 500.0
# Tried in turn until one is too much for the machine, to the same engines.
HIGHER_RATES = (1_000.0, 2_000.0, 4_000.0, 6_000.0, 7_000.0, 8_000.0, 9_000.0, 10_000.0)
SECONDS = 10.0
HIGHER_SECONDS = 4.0
QUICK_SECONDS = 2.0
REPETITIONS = 5
QUICK_REPETITIONS = 2
PROMPT_WORDS = 200
# Words that the simulated engine's tokenizer knows as one token each.
WORDS = ("to", "of", "in", "is", "it", "we", "he", "as", "on", "at", "by", "or", "an", "so", "us", "my")
# At the 95th percentile, above the direct path.
LIMIT_MS = 1.5
# Above this the client was too slow itself, and its figures say nothing of a router. A rate at which one answer in a
# hundred takes longer is not carried.
MOST_LATE_SECONDS = 0.25
PERCENTILES = ("p50_ms", "p95_ms", "p99_ms")
DIRECT = "direct"
KVIST = "kvist"
MOCK = ROOT / "target" / "bench-edge" / "release" / "kvist-bench-edge"
# Neither engine takes any time, so that what is left is the way there and back.
ENGINE_ARGUMENTS = {
    "prefill_tokens_per_second": 0.0,
    "decode_step_ms": 0.001,
    "decode_step_per_request_ms": 0.0,
    "blocks": 65_536,
    "max_running": 256,
    "prefill_chunk_tokens": 1_048_576,
}


class TooFastError(WrongAnswerError):
    """The machine cannot keep the rate."""


def prompts(address: str, count: int, *, seed: str) -> list[bytes]:
    """Requests for one token each, all with prompts of their own."""
    chance = random.Random(seed)
    return [
        request_bytes(
            address,
            model=MODEL,
            system="to",
            question=" ".join(chance.choices(WORDS, k=PROMPT_WORDS)),
            max_tokens=1,
        )
        for _ in range(count)
    ]


async def measure(
    address: str, *, seconds: float, repetition: int, per_second: float = RATE_PER_SECOND
) -> dict[str, float]:
    """One repetition on one path: a short warm-up, then the plan.

    Raises:
        WrongAnswerError: An answer is wrong, or the machine cannot keep the rate (`TooFastError`).
    """
    warm_up = prompts(address, int(RATE_PER_SECOND), seed=f"warm-up {repetition}")
    await drive_at_pace(address, warm_up, per_second=RATE_PER_SECOND)
    count = int(per_second * seconds)
    samples, late = await drive_at_pace(
        address, prompts(address, count, seed=f"{per_second} {repetition}"), per_second=per_second
    )
    check(samples, count=count, late=late)
    took = [(sample.ended_at - sample.began_at) * 1000 for sample in samples]
    return {
        "p50_ms": percentile(took, 50),
        "p95_ms": percentile(took, 95),
        "p99_ms": percentile(took, 99),
        "latest_start_ms": late * 1000,
    }


def check(samples: Sequence[Sample], *, count: int, late: float) -> None:
    """Sees to it that each request was answered in full and left in time.

    Raises:
        WrongAnswerError: Not so.
    """
    if len(samples) != count or any(sample.answer.completion_tokens != 1 for sample in samples):
        raise WrongAnswerError(f"{len(samples)} of {count} requests were answered, or not with one token")
    if late > MOST_LATE_SECONDS:
        raise TooFastError(f"the client fell {late:.2f} s behind its plan: this machine cannot keep the rate")


async def highest(addresses: Mapping[str, str], *, seconds: float, log: Console) -> dict[str, Any] | None:
    """Both paths at the highest of the higher rates that the machine carries; none when it carries none."""
    found = None
    for rate in HIGHER_RATES:
        log.print(f"{rate:g} requests a second", style="dim")
        try:
            figures = {
                path: await measure(address, seconds=seconds, repetition=0, per_second=rate)
                for path, address in addresses.items()
            }
        except TooFastError:
            break
        if any(one["p99_ms"] > MOST_LATE_SECONDS * 1000 for one in figures.values()):
            break
        added = {name: round(figures[KVIST][name] - figures[DIRECT][name], 3) for name in PERCENTILES}
        found = {"requests_per_second": rate, "figures": figures, "added": added}
    return found


async def measure_all(
    *, repetitions: int, seconds: float, higher_seconds: float, cores: Placement, log: Console
) -> tuple[dict[str, list[dict[str, float]]], dict[str, Any] | None]:
    """Both paths in turn, so that what the machine does meanwhile meets both; then the higher rates."""
    os.sched_setaffinity(0, cores.others)
    figures: dict[str, list[dict[str, float]]] = {DIRECT: [], KVIST: []}
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as name:
        folder = Path(name)
        engine = Process(
            "engine-direct",
            [str(MOCK), "--ready-file", "{ready}", "--step-microseconds", "0", "--model", MODEL],
            folder=folder,
        )
        async with running_mesh({MODEL: ENGINE_ARGUMENTS}, folder=folder, cores=cores, replicas=ENGINES) as mesh:
            try:
                addresses = {DIRECT: (await engine.start())["address"], KVIST: mesh.http_address}
                for repetition in range(repetitions):
                    for path in (DIRECT, KVIST) if repetition % 2 == 0 else (KVIST, DIRECT):
                        log.print(f"repetition {repetition + 1} of {repetitions}: {path}", style="dim")
                        found = await measure(addresses[path], seconds=seconds, repetition=repetition)
                        figures[path].append(found)
                        mesh.check()
                        engine.check()
                at_most = await highest(addresses, seconds=higher_seconds, log=log)
            finally:
                await engine.stop()
    return figures, at_most


def result_of(
    figures: dict[str, list[dict[str, float]]], at_most: dict[str, Any] | None, *, facts: dict[str, Any]
) -> dict[str, Any]:
    """What the RESULT line says."""
    summary = {path: spreads(found, digits=3) for path, found in figures.items()}
    added = {name: round(summary[KVIST][name]["median"] - summary[DIRECT][name]["median"], 3) for name in PERCENTILES}
    return {
        "benchmark": BENCHMARK,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "requests_per_second": RATE_PER_SECOND,
        "prompt_words": PROMPT_WORDS,
        "repetitions": len(figures[KVIST]),
        "figures": summary,
        "added": added,
        "highest_rate": at_most,
        "limit_ms": LIMIT_MS,
        "are_limits_met": added["p95_ms"] < LIMIT_MS,
        **facts,
    }


def table_of(result: dict[str, Any]) -> Table:
    """The same for people."""
    rate = result["requests_per_second"]
    table = Table(title=f"milliseconds of a request at {rate:g}/s, medians over repetitions", title_justify="left")
    table.add_column("path")
    for name in PERCENTILES:
        table.add_column(name.removesuffix("_ms"), justify="right")
    for path, found in result["figures"].items():
        table.add_row(path, *(f"{found[name]['median']:.2f}" for name in PERCENTILES))
    verdict = "" if result["are_limits_met"] else ", OVER"
    table.add_row(f"added{verdict}", *(f"{result['added'][name]:.2f}" for name in PERCENTILES))
    if at_most := result["highest_rate"]:
        table.add_section()
        for path, found in (at_most["figures"] | {"added": at_most["added"]}).items():
            table.add_row(
                f"{path} at {at_most['requests_per_second']:,.0f}/s", *(f"{found[name]:.2f}" for name in PERCENTILES)
            )
    return table


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="./task bench:latency --", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repetitions; keeps no result")
    parser.add_argument("--output", type=Path, help=f"where the result is kept (default: results/{BENCHMARK}.json)")
    return parser.parse_args()


def main() -> int:
    """Measures, prints and keeps. Returns 1 when the limit is not met, 2 when nothing could be measured."""
    flags = arguments()
    log = Console(stderr=True)
    cores = placement(usable_cores())
    try:
        facts = {"build": build_facts(), "machine": machine_facts() | {"router_cores": len(cores.router)}}
        figures, at_most = asyncio.run(
            measure_all(
                repetitions=QUICK_REPETITIONS if flags.quick else REPETITIONS,
                seconds=QUICK_SECONDS if flags.quick else SECONDS,
                higher_seconds=QUICK_SECONDS if flags.quick else HIGHER_SECONDS,
                cores=cores,
                log=log,
            )
        )
    except FAILURES as failure:
        return say_why(failure, task="bench:latency", log=log)
    facts["machine"]["load_average_after"] = [round(value, 2) for value in os.getloadavg()]
    result = result_of(figures, at_most, facts=facts)
    path = path_of(BENCHMARK, flags.output, is_partial=flags.quick)
    return publish(result, table_of(result), path=path, width=120)


if __name__ == "__main__":
    run(main)
