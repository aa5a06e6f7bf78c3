"""An edge alone as a process, before the router of an embedded cluster."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import anthropic
import openai
import pytest

from support.embedded import EmbeddedCluster, eventually

LIMIT_SECONDS = 60


@dataclass
class Edge:
    """A running edge."""

    process: subprocess.Popen[bytes]
    http_address: str

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.http_address}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@pytest.fixture(scope="module")
def cluster(start: Callable[..., EmbeddedCluster]) -> EmbeddedCluster:
    return start("--engine=sim", "--workers=2", '--engine-arguments={"decodeStepMs": 20}')


@pytest.fixture
def edge(cluster: EmbeddedCluster, tmp_path: Path) -> Iterator[Edge]:
    ready = tmp_path / "ready.json"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            (sys.executable, "-m", "kvist_router", "--ready-file", ready, "--set",
             f"remote_routers={cluster.address('router')}", "--set", "telemetry.admin_listen=127.0.0.1:0"),
            stderr=log,
        )  # fmt: skip
    try:
        eventually("the edge listens", ready.exists, limit_seconds=LIMIT_SECONDS)
        running = Edge(process, json.loads(ready.read_text())["http_address"])
        eventually("the edge is ready", running.is_ready, limit_seconds=LIMIT_SECONDS)
        yield running
    finally:
        process.kill()
        process.wait()


def test_official_clients_cannot_tell_it_from_a_router(cluster: EmbeddedCluster, edge: Edge) -> None:
    client = openai.OpenAI(base_url=f"http://{edge.http_address}/v1", api_key="none", max_retries=0, timeout=60)
    assert ["sim"] == [model.id for model in client.models.list()]
    chat = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    stream = client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = cluster.client().chat.completions.create(**chat)
    assert (text, chunks[-1].usage.completion_tokens) == (whole.choices[0].message.content, 8)
    cluster.decision(chunks[0].id.removeprefix("chatcmpl-"))
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**chat | {"model": "nothing"})
    assert unknown.value.code == "model_not_found"
    other = anthropic.Anthropic(base_url=f"http://{edge.http_address}", api_key="none", max_retries=0, timeout=60)
    with other.messages.stream(**chat) as messages:
        answer = messages.get_final_message()
    assert ("max_tokens", 8) == (answer.stop_reason, answer.usage.output_tokens)
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == whole.usage.prompt_tokens


def test_it_lets_answers_end_when_it_is_stopped(edge: Edge) -> None:
    client = openai.OpenAI(base_url=f"http://{edge.http_address}/v1", api_key="none", max_retries=0, timeout=60)
    stream = client.completions.create(model="sim", prompt="hello", max_tokens=50, stream=True)
    next(iter(stream))
    edge.process.send_signal(signal.SIGTERM)
    eventually("it is not ready", lambda: not edge.is_ready(), limit_seconds=LIMIT_SECONDS)
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert edge.process.wait(timeout=LIMIT_SECONDS) == 0
