"""CPU per request of Kvist's router and of its peers, on the same engine and load. `./task bench:edge -- --help`."""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from perf.load import Sample, drive, request_bytes
from perf.machine_facts import ROOT, build_facts, machine_facts
from perf.memory import RouterMemory, router_memory
from perf.mesh import Mesh, running_mesh
from perf.peers import PEERS, install_peers, peer_facts, started_peer
from perf.placement import Placement, placement, usable_cores
from perf.processes import Process
from perf.results import FAILURES, path_of, publish, run, say_why
from perf.sse import WrongAnswerError
from perf.summary import percentile, spreads

BENCHMARK = "bench-edge"
KVIST = "kvist"
# Kvist before the peers' engine: an upstream whose bytes it passes on, as it does with servers outside the mesh.
RELAYING = "kvist, relaying"
RELAYED_PREFIX = "relayed-"
REPETITIONS = 5
QUICK_REPETITIONS = 2
QUICK_SHARE = 0.25
# Engines behind each router: with one, there would be nothing to choose.
ENGINES = 2
# What a router still writes when its client has the answer: the request's log line, metrics, the reservation's end.
SETTLE_SECONDS = 0.1
# Most CPU of Kvist's router, as a share of the better peer's.
LIMIT_RATIO = 0.5
# Most memory of Kvist's router after the run, beside the index and the tokenizer: 60 MB.
LIMIT_MEBIBYTES = 60_000_000 / 1024**2
MOCK = ROOT / "target" / "bench-edge" / "release" / "kvist-bench-edge"

# Time between two tokens of one answer. At a millisecond client and engine take all of their cores; at eight each
# token of each request is a wake-up, an event and a write, as behind a GPU.
MODELS = {"fast": 1.0, "paced": 8.0}
ENGINE_ARGUMENTS = {
    "prefill_tokens_per_second": 0.0,
    "decode_step_per_request_ms": 0.0,
    "blocks": 65_536,
    "max_running": 256,
    "prefill_chunk_tokens": 1_048_576,
}
# Words that the simulated engine's tokenizer knows as one token each.
WORDS = ("to", "of", "in", "is", "it", "we", "he", "as", "on", "at", "by", "or", "an", "so", "us", "my")
TEMPLATE_TOKENS = 40


# Repetitions of each row and router.
Figures = dict[str, dict[str, list[dict[str, float]]]]


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of load.

    Attributes:
        name: Name in the table.
        model: Which engines.
        prompt_words: Length of the prompt.
        repeated_share: How much of it, from the start, is the same in all requests.
        max_tokens: Length of the answer.
        requests: Requests of one repetition.
        concurrency: Requests at once.
    """

    name: str
    model: str
    prompt_words: int
    repeated_share: float
    max_tokens: int
    requests: int
    concurrency: int = 32


ROWS = (
    Row("1 token", "fast", 64, 0.5, 1, 1200),
    Row("64 tokens", "fast", 64, 0.5, 64, 320),
    Row("256 tokens", "fast", 64, 0.5, 256, 96),
    Row("64 tokens, paced", "paced", 64, 0.5, 64, 192),
    Row("256 tokens, paced", "paced", 64, 0.5, 256, 64),
    Row("8,000 new words", "fast", 8000, 0.0, 16, 160),
    Row("8,000 words, 95 % repeated", "fast", 8000, 0.95, 16, 160),
    Row("128 streams of 64 tokens", "fast", 64, 0.5, 64, 512, concurrency=128),
)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A running router with engines of its own.

    Attributes:
        name: Its name.
        router: Its process.
        engines: Its engines' processes, by model.
        addresses: `host:port` for clients, by model.
        model_prefix: What stands before a model's name in its requests.
    """

    name: str
    router: Mapping[str, Process]
    engines: Mapping[str, tuple[Process, ...]]
    addresses: Mapping[str, str]
    model_prefix: str = ""


def requests_of(row: Row, contestant: Contestant, count: int, *, seed: str) -> Iterator[bytes]:
    """Requests that share the beginning of their prompts."""
    shared_words = int(row.prompt_words * row.repeated_share)
    chance = random.Random(f"{row.name} {seed}")
    shared = random.Random(row.name).choices(WORDS, k=shared_words)
    address, model = contestant.addresses[row.model], contestant.model_prefix + row.model
    for _ in range(count):
        own = chance.choices(WORDS, k=row.prompt_words - shared_words)
        system = " ".join(shared) if shared else "to"
        yield request_bytes(address, model=model, system=system, question=" ".join(own), max_tokens=row.max_tokens)


def check(row: Row, samples: Sequence[Sample], *, count: int) -> None:
    """Sees to it that each request was answered, in full.

    Raises:
        WrongAnswerError: One was not.
    """
    if len(samples) != count:
        raise WrongAnswerError(f"{row.name}: {len(samples)} of {count} requests were answered")
    for sample in samples:
        answer = sample.answer
        is_prompt_right = abs(answer.prompt_tokens - row.prompt_words) <= TEMPLATE_TOKENS
        if answer.completion_tokens != row.max_tokens or answer.finish_reason != "length" or not is_prompt_right:
            raise WrongAnswerError(f"{row.name}: {answer}")


async def measure(contestant: Contestant, row: Row, *, share: float, repetition: int) -> dict[str, float]:
    """One repetition of a row: warm-up, then a fixed number of requests from the first to the last."""
    address = contestant.addresses[row.model]
    router, engines = contestant.router[row.model], contestant.engines[row.model]
    # The same prompts for every router, and other ones each time, since a router may remember what it has seen.
    warm_up = row.concurrency
    requests = requests_of(row, contestant, warm_up, seed=f"warm-up {repetition}")
    check(row, await drive(address, requests, concurrency=row.concurrency), count=warm_up)
    count = max(row.concurrency, int(row.requests * share))
    prepared = list(requests_of(row, contestant, count, seed=str(repetition)))
    await asyncio.sleep(SETTLE_SECONDS)
    user_before, system_before = router.user_and_system_seconds()
    router_before, engines_before = router.cpu_seconds(), sum(engine.cpu_seconds() for engine in engines)
    samples = await drive(address, iter(prepared), concurrency=row.concurrency)
    seconds = max(sample.ended_at for sample in samples) - min(sample.began_at for sample in samples)
    await asyncio.sleep(SETTLE_SECONDS)
    router_seconds = router.cpu_seconds() - router_before
    engine_seconds = sum(engine.cpu_seconds() for engine in engines) - engines_before
    user_after, system_after = router.user_and_system_seconds()
    user, system = user_after - user_before, system_after - system_before
    for process in (router, *engines):
        process.check()
    check(row, samples, count=count)
    first = [(sample.first_text_at - sample.began_at) * 1000 for sample in samples]
    return {
        "router_cpu_microseconds": router_seconds / count * 1e6,
        "router_and_engines_cpu_microseconds": (router_seconds + engine_seconds) / count * 1e6,
        # From the kernel's ticks, which are coarse: of the share alone.
        "router_kernel_share": system / max(user + system, 1e-9),
        "requests_per_second": count / seconds,
        "events_per_request": sum(sample.answer.events for sample in samples) / count,
        "first_token_p50_ms": percentile(first, 50),
        "first_token_p99_ms": percentile(first, 99),
        "router_resident_mebibytes": router.resident_bytes() / 1024**2,
    }


@contextlib.asynccontextmanager
async def running_kvist(
    models: Sequence[str], *, folder: Path, cores: Placement
) -> AsyncIterator[tuple[Contestant, Contestant, Mesh]]:
    """Kvist over its own protocol, NATS, relay and index included; and the same router before the peers' engine."""
    arguments = {model: ENGINE_ARGUMENTS | {"decode_step_ms": MODELS[model]} for model in models}
    async with contextlib.AsyncExitStack() as stack:
        outside: dict[str, tuple[Process, ...]] = {}
        upstreams = []
        for model in models:
            process = _mock(model, f"{RELAYED_PREFIX}{model}", folder)
            stack.push_async_callback(process.stop)
            url = f"http://{(await process.start())['address']}/v1"
            outside[model] = (process,)
            upstreams.append({"name": model, "url": url, "models": {RELAYED_PREFIX + model: model}})
        mesh = await stack.enter_async_context(
            running_mesh(arguments, folder=folder, cores=cores, replicas=ENGINES, upstreams=upstreams)
        )
        routers, addresses = dict.fromkeys(models, mesh.router), dict.fromkeys(models, mesh.http_address)
        own = Contestant(KVIST, routers, mesh.workers, addresses)
        yield own, Contestant(RELAYING, routers, outside, addresses, RELAYED_PREFIX), mesh


@contextlib.asynccontextmanager
async def running_peers(models: Sequence[str], *, folder: Path, cores: Placement) -> AsyncIterator[list[Contestant]]:
    """The peers over HTTP, each with a router process for each model, since none of them routes by model reliably."""
    async with contextlib.AsyncExitStack() as stack:
        contestants = []
        for peer in PEERS:
            routers: dict[str, Process] = {}
            engines: dict[str, tuple[Process, ...]] = {}
            addresses: dict[str, str] = {}
            for model in models:
                started = [_mock(model, f"{peer.name}-{model}-{number}", folder) for number in range(ENGINES)]
                announced = []
                for process in started:
                    stack.push_async_callback(process.stop)
                    announced.append((await process.start())["address"])
                engines[model] = tuple(started)
                place = folder / f"{peer.name}-{model}"
                place.mkdir()
                router, addresses[model] = await started_peer(peer, announced, model=model, folder=place, cores=cores)
                stack.push_async_callback(router.stop)
                routers[model] = router
            contestants.append(Contestant(peer.name, routers, engines, addresses))
        yield contestants


def _mock(model: str, name: str, folder: Path) -> Process:
    step = str(int(MODELS[model] * 1000))
    command = [str(MOCK), "--ready-file", "{ready}", "--step-microseconds", step, "--model", model]
    return Process(f"engine-{name}", command, folder=folder)


async def measure_all(
    rows: Sequence[Row], *, repetitions: int, share: float, cores: Placement, log: Console
) -> tuple[Figures, RouterMemory]:
    """All rows and all routers, interleaved, so that what the machine does meanwhile meets all of them."""
    os.sched_setaffinity(0, cores.others)
    models = list(dict.fromkeys(row.model for row in rows))
    figures: Figures = {row.name: {} for row in rows}
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as folder:
        async with (
            running_kvist(models, folder=Path(folder), cores=cores) as (kvist, relaying, mesh),
            running_peers(models, folder=Path(folder), cores=cores) as peers,
        ):
            for repetition, row in itertools.product(range(repetitions), rows):
                contestants = [kvist, relaying, *peers]
                # Nobody is always the first after a change of the load.
                first = repetition % len(contestants)
                for contestant in contestants[first:] + contestants[:first]:
                    log.print(
                        f"repetition {repetition + 1} of {repetitions}: {row.name}: {contestant.name}", style="dim"
                    )
                    found = await measure(contestant, row, share=share, repetition=repetition)
                    figures[row.name].setdefault(contestant.name, []).append(found)
            memory = await router_memory(mesh, threads=len(cores.router))
    return figures, memory


def result_of(rows: Sequence[Row], figures: Figures, memory: RouterMemory, *, facts: dict[str, Any]) -> dict[str, Any]:
    """What the RESULT line says."""
    results = []
    for row in rows:
        measured = figures[row.name]
        entry = asdict(row) | {
            "repetitions": len(measured[KVIST]),
            "figures": {name: spreads(found, digits=3) for name, found in measured.items()},
        }
        entry["ratio_to_better_peer"] = ratio(measured)
        entry["is_within_limit"] = entry["ratio_to_better_peer"] <= LIMIT_RATIO
        results.append(entry)
    return {
        "benchmark": BENCHMARK,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "limit_ratio": LIMIT_RATIO,
        "limit_mebibytes": round(LIMIT_MEBIBYTES, 1),
        "are_limits_met": memory.rest < LIMIT_MEBIBYTES and all(entry["is_within_limit"] for entry in results),
        "rows": results,
        "router_mebibytes": {name: round(value, 1) for name, value in asdict(memory).items()}
        | {"rest": round(memory.rest, 1)},
        "peers": peer_facts(),
        **facts,
    }


def ratio(measured: Mapping[str, Sequence[Mapping[str, float]]]) -> float:
    """Kvist's CPU per request as a share of the better peer's: medians over the repetitions."""
    medians = {
        name: statistics.median(one["router_cpu_microseconds"] for one in found) for name, found in measured.items()
    }
    return round(medians[KVIST] / min(medians[peer.name] for peer in PEERS), 3)


def table_of(result: Mapping[str, Any]) -> Table:
    """The same for people."""
    table = Table(title="router CPU per request, median (least to most)", title_justify="left")
    for heading in ("load", "router"):
        table.add_column(heading)
    for heading in ("CPU µs", "with engines µs", "kernel", "events", "requests/s", "first token ms", "MiB"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        verdict = "" if row["is_within_limit"] else ", OVER"
        for name, figures in row["figures"].items():
            cpu = figures["router_cpu_microseconds"]
            table.add_row(
                f"{row['name']}: {row['ratio_to_better_peer']:.2f}{verdict}" if name == KVIST else "",
                name,
                f"{cpu['median']:,.0f} ({cpu['least']:,.0f} to {cpu['most']:,.0f})",
                f"{figures['router_and_engines_cpu_microseconds']['median']:,.0f}",
                f"{figures['router_kernel_share']['median']:.0%}",
                f"{figures['events_per_request']['median']:,.0f}",
                f"{figures['requests_per_second']['median']:,.0f}",
                f"{figures['first_token_p50_ms']['median']:.1f} / {figures['first_token_p99_ms']['median']:.1f}",
                f"{figures['router_resident_mebibytes']['median']:.0f}",
            )
        table.add_section()
    memory = result["router_mebibytes"]
    table.caption = (
        f"Kvist's router after all: {memory['resident']} MiB, of which index {memory['index']}, "
        f"tokenizer {memory['tokenizer']}, rest {memory['rest']} (limit {result['limit_mebibytes']:.0f})"
    )
    return table


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="./task bench:edge --", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer requests and repetitions; keeps no result")
    parser.add_argument("--repetitions", type=int, help=f"repetitions of each row (default: {REPETITIONS})")
    parser.add_argument("--only", metavar="TEXT", default="", help="only rows whose name holds this; keeps no result")
    parser.add_argument("--output", type=Path, help=f"where the result is kept (default: results/{BENCHMARK}.json)")
    return parser.parse_args()


def main() -> int:
    """Measures, prints and keeps. Returns 1 when a limit is not met, 2 when nothing could be measured."""
    flags = arguments()
    log = Console(stderr=True)
    rows = [row for row in ROWS if flags.only in f"{row.name}."]
    repetitions = flags.repetitions or (QUICK_REPETITIONS if flags.quick else REPETITIONS)
    share = QUICK_SHARE if flags.quick else 1.0
    cores = placement(usable_cores())
    try:
        install_peers()
        facts = {"build": build_facts(), "machine": machine_facts() | {"router_cores": len(cores.router)}}
        figures, memory = asyncio.run(measure_all(rows, repetitions=repetitions, share=share, cores=cores, log=log))
    except FAILURES as failure:
        return say_why(failure, task="bench:edge", log=log)
    facts["machine"]["load_average_after"] = [round(value, 2) for value in os.getloadavg()]
    result = result_of(rows, figures, memory, facts=facts)
    path = path_of(BENCHMARK, flags.output, is_partial=bool(flags.quick or flags.only))
    return publish(result, table_of(result), path=path)


if __name__ == "__main__":
    run(main)
