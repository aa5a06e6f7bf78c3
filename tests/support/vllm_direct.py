"""What vLLM answers when it is called directly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvist import engines
from support.vllm_worker import ENVIRONMENT

SCRIPT = Path(__file__).parents[1] / "vllm" / "direct_vllm.py"


async def answers_of_vllm(
    folder: Path, *, arguments: Mapping[str, Any], prompts: Sequence[Sequence[int]], max_tokens: int | None = None
) -> list[list[Any]]:
    """Greedy tokens of each prompt, or its embedding without `max_tokens`, of an engine in a process of its own."""
    answer = folder / "answer.json"
    environment = engines.find("vllm")
    assert environment is not None
    process = await asyncio.create_subprocess_exec(
        environment.python, SCRIPT, answer,
        stdin=asyncio.subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
        start_new_session=True,
    )  # fmt: skip
    asked: dict[str, Any] = {
        # Of a command line it would be read as a whole number.
        "arguments": {**arguments, "kv-cache-memory-bytes": int(arguments["kv-cache-memory-bytes"])},
        "prompts": prompts,
    }
    if max_tokens is not None:
        asked["max_tokens"] = max_tokens
    try:
        await process.communicate(json.dumps(asked).encode())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    found: list[list[Any]] = json.loads(answer.read_text())
    return found
