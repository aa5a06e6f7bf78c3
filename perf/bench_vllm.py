"""CPU of the process in front of vLLM's engine core, for each token: Kvist's worker beside vLLM's own HTTP server.

`./task bench:vllm -- --help` names the flags.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from kvist import _core, engines
from perf.machine_facts import ROOT, build_facts, machine_facts
from perf.processes import Process, ProcessFailedError
from perf.results import FAILURES, path_of, publish, run, say_why
from perf.sse import WrongAnswerError
from perf.summary import spreads
from perf.token_clients import ConnectClient, HttpClient, TokenClient

BENCHMARK = "bench-vllm"
BATCH = 8
MAX_TOKENS = 128
PROMPT_TOKENS = 32
BATCHES = 4
REPETITIONS = 5
QUICK_REPETITIONS = 1
START_LIMIT_SECONDS = 900.0
# What a front still does when its client has the answer.
SETTLE_SECONDS = 0.2
# A model that costs next to nothing, so that the fronts are kept busy: two layers, with weights that nobody trained.
ENGINE = {
    "load-format": "dummy",
    "hf-overrides": {"num_hidden_layers": 2},
    "dtype": "float32",
    "enforce-eager": True,
    "max-model-len": 512,
    "max-num-seqs": BATCH,
    "max-num-batched-tokens": 512,
    "block-size": 32,
    "kv-cache-memory-bytes": 64 << 20,
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}


@dataclass(frozen=True, slots=True)
class Front:
    """One way to the engine.

    Attributes:
        name: Name in the table.
        process: The process whose CPU time is counted.
        client: Who asks.
    """

    name: str
    process: Process
    client: TokenClient


def overlay(folder: Path) -> Path:
    """A folder with the release build of Kvist alone, which the engine's own Python imports before anything else."""
    packages = Path(_core.__file__ or "").parents[1]
    folder.mkdir()
    for package in ("kvist", "kvist_worker"):
        (folder / package).symlink_to(packages / package)
    return folder


def flag(name: str, value: object) -> str:
    """An argument as vLLM's command line has it."""
    if value is True:
        return f"--{name}"
    return f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"


async def until_there(process: Process, is_there: Any) -> None:
    """Waits until a process serves.

    Raises:
        ProcessFailedError: It ended, or was not ready in time.
    """
    deadline = time.monotonic() + START_LIMIT_SECONDS
    while not await is_there():
        process.check()
        if time.monotonic() > deadline:
            raise ProcessFailedError(f"{process.name} was not ready in time\n{process.log_tail()}")
        await asyncio.sleep(0.5)


def check_build(process: Process) -> None:
    """Sees to it that a worker runs the build that is measured.

    Raises:
        ProcessFailedError: It does not.
    """
    loaded = {os.path.realpath(entry.path) for entry in psutil.Process(process.process_id).memory_maps()}
    if os.path.realpath(_core.__file__ or "") not in loaded:
        raise ProcessFailedError(f"{process.name} does not run the build that is measured")


@contextlib.asynccontextmanager
async def worker(name: str, settings: Mapping[str, Any], *, folder: Path) -> AsyncIterator[tuple[Process, str]]:
    """A worker, and where it serves."""
    path, ready = folder / f"{name}.settings.json", folder / f"{name}.announced.json"
    path.write_text(json.dumps({"worker_uid": name, "model": "front", **settings}))
    command = [sys.executable, "-m", "kvist_worker", "--settings-file", str(path), "--ready-file", str(ready)]
    process = Process(name, command, folder=folder, is_announced=False)
    await process.start()

    async def is_announced() -> bool:
        return ready.exists()

    try:
        await until_there(process, is_announced)
        check_build(process)
        yield process, json.loads(ready.read_text())["grpc_address"]
    finally:
        await process.stop()


@contextlib.asynccontextmanager
async def server(model: Path, *, folder: Path) -> AsyncIterator[tuple[Process, int]]:
    """The HTTP server of vLLM, and its port."""
    environment = engines.find("vllm")
    if environment is None:
        raise ProcessFailedError("vLLM is not installed: kvist engine install vllm --cpu")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    arguments = ENGINE | {
        "model": model,
        "served-model-name": "front",
        "host": "127.0.0.1",
        "port": port,
        "enable-scale-out": True,
        "disable-uvicorn-access-log": True,
    }
    command = [str(environment.python), "-m", "vllm.entrypoints.openai.api_server"]
    command += [flag(name, value) for name, value in arguments.items()]
    process = Process("server", command, folder=folder, is_announced=False)
    await process.start()

    async def is_healthy() -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        status = await reader.readline()
        writer.close()
        return b" 200 " in status

    try:
        await until_there(process, is_healthy)
        yield process, port
    finally:
        await process.stop()


@contextlib.asynccontextmanager
async def fronts(model: Path, *, folder: Path, log: Console) -> AsyncIterator[list[Front]]:
    """All of them, up. Two engines run, and each waits while the other is asked."""
    async with contextlib.AsyncExitStack() as stack:
        log.print("starting vLLM's server", style="dim")
        http, port = await stack.enter_async_context(server(model, folder=folder))
        log.print("starting Kvist's worker", style="dim")
        embedded = {"engine": "vllm", "engine_arguments": ENGINE | {"model": str(model)}}
        own, address = await stack.enter_async_context(worker("embedded", embedded, folder=folder))
        attached = {
            "engine": "attached",
            "engine_arguments": {"url": f"http://127.0.0.1:{port}", "tokenizer": str(model), "max-num-seqs": BATCH},
        }
        beside, beside_address = await stack.enter_async_context(worker("attached", attached, folder=folder))
        clients = [
            await stack.enter_async_context(ConnectClient.connected(where, name))
            for where, name in ((address, "bench-embedded"), (beside_address, "bench-attached"))
        ]
        yield [
            Front("Kvist's worker, `Connect`", own, clients[0]),
            Front("vLLM's server, `/inference/v1/generate`", http, HttpClient(port, "/inference/v1/generate")),
            Front("vLLM's server, `/v1/completions`", http, HttpClient(port, "/v1/completions")),
            Front("Kvist's attached worker, beside the server", beside, clients[1]),
        ]


async def measure(front: Front, chance: random.Random, *, batches: int) -> dict[str, float]:
    """One repetition: a batch to warm up, then some that count.

    Raises:
        WrongAnswerError: Not all tokens came.
    """

    async def ask(count: int) -> tuple[int, int]:
        tokens = messages = 0
        for _ in range(count):
            prompts = [chance.choices(range(1_000, 40_000), k=PROMPT_TOKENS) for _ in range(BATCH)]
            received = await front.client.batch(prompts, max_tokens=MAX_TOKENS)
            if received.tokens != BATCH * MAX_TOKENS:
                raise WrongAnswerError(f"{front.name}: {received.tokens} of {BATCH * MAX_TOKENS} tokens")
            tokens += received.tokens
            messages += received.messages
        return tokens, messages

    await ask(1)
    await asyncio.sleep(SETTLE_SECONDS)
    cpu_before, began = front.process.cpu_seconds(), time.monotonic()
    tokens, messages = await ask(batches)
    seconds = time.monotonic() - began
    await asyncio.sleep(SETTLE_SECONDS)
    cpu_seconds = front.process.cpu_seconds() - cpu_before
    front.process.check()
    return {
        "cpu_microseconds_per_token": cpu_seconds / tokens * 1e6,
        "tokens_per_message": tokens / messages,
        "tokens_per_second": tokens / seconds,
    }


async def measure_all(
    model: Path, *, repetitions: int, batches: int, log: Console
) -> dict[str, list[dict[str, float]]]:
    """All fronts, taking turns, so that what the machine does meanwhile meets all of them."""
    figures: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as name:
        folder = Path(name)
        os.environ.update(ENVIRONMENT | {"PYTHONPATH": str(overlay(folder / "overlay"))})
        async with fronts(model, folder=folder, log=log) as all_fronts:
            for repetition, front in itertools.product(range(repetitions), all_fronts):
                log.print(f"repetition {repetition + 1} of {repetitions}: {front.name}", style="dim", markup=False)
                found = await measure(front, random.Random(f"{front.name} {repetition}"), batches=batches)
                figures.setdefault(front.name, []).append(found)
    return figures


def table_of(result: Mapping[str, Any]) -> Table:
    """The result for people."""
    title = f"front of vLLM at batch {BATCH}, {MAX_TOKENS} tokens each: median (least to most)"
    table = Table(title=title, title_justify="left")
    table.add_column("front")
    for heading in ("CPU µs a token", "tokens a message", "tokens/s"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        cpu, message, rate = (row["figures"][name] for name in row["figures"])
        table.add_row(
            row["name"],
            f"{cpu['median']:,.0f} ({cpu['least']:,.0f} to {cpu['most']:,.0f})",
            f"{message['median']:.1f}",
            f"{rate['median']:,.0f}",
        )
    return table


def main() -> int:
    """Measures, prints and keeps. Returns 2 when nothing could be measured."""
    parser = argparse.ArgumentParser(prog="./task bench:vllm --", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short repetition; keeps no result")
    parser.add_argument(
        "--model", type=Path, default=ROOT / "target" / "models" / "smollm2", help="folder of the model"
    )
    parser.add_argument("--output", type=Path, help=f"where the result is kept (default: results/{BENCHMARK}.json)")
    flags = parser.parse_args()
    log = Console(stderr=True)
    repetitions = QUICK_REPETITIONS if flags.quick else REPETITIONS
    batches = 1 if flags.quick else BATCHES
    try:
        facts = {"build": build_facts(), "machine": machine_facts()}
        figures = asyncio.run(measure_all(flags.model, repetitions=repetitions, batches=batches, log=log))
    except FAILURES as failure:
        return say_why(failure, task="bench:vllm", log=log)
    result = {
        "benchmark": BENCHMARK,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "batch": BATCH,
        "max_tokens": MAX_TOKENS,
        "prompt_tokens": PROMPT_TOKENS,
        "tokens_per_repetition": batches * BATCH * MAX_TOKENS,
        "repetitions": repetitions,
        "engine_arguments": ENGINE,
        "rows": [{"name": name, "figures": spreads(found, digits=1)} for name, found in figures.items()],
        **facts,
    }
    path = path_of(BENCHMARK, flags.output, is_partial=flags.quick)
    return publish(result, table_of(result), path=path)


if __name__ == "__main__":
    run(main)
