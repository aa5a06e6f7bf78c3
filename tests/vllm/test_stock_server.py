"""vLLM's own HTTP server, which Kvist did not start, behind the whole mesh."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from kvist import engines
from support.embedded import EmbeddedCluster, eventually
from support.vllm_worker import BLOCK_SIZE_TOKENS, ENVIRONMENT, KV_BLOCKS, START_SECONDS

pytestmark = pytest.mark.timeout(1200)

# The same server by each of its doors.
GENERATE, COMPLETIONS = "stock-generate", "stock-completions"
LONG_PROMPT = "Here are the rules of the library. Books are lent for four weeks and must come back in time. " * 5
EVENTS = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}


@contextmanager
def running_server(folder: Path, model_folder: Path) -> Iterator[str]:
    """The server, whose address is yielded once it is healthy; ended with all its processes."""
    environment = engines.find("vllm")
    assert environment is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    arguments = {
        "model": model_folder,
        "served-model-name": "stock",
        "dtype": "float32",
        "max-model-len": 512,
        "max-num-seqs": 8,
        "max-num-batched-tokens": 512,
        "block-size": BLOCK_SIZE_TOKENS,
        "num-gpu-blocks-override": KV_BLOCKS,
        "kv-cache-memory-bytes": 64 << 20,
        "prefix-caching-hash-algo": "sha256_cbor",
        "kv-events-config": json.dumps(EVENTS),
        "structured-outputs-config": json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}),
        "host": "127.0.0.1",
        "port": port,
    }
    flags = [f"--{name}={value}" for name, value in arguments.items()]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [environment.python, "-m", "vllm.entrypoints.openai.api_server", *flags, "--enforce-eager",
             "--enable-scale-out", "--enable-prompt-tokens-details"],
            env={**os.environ, **ENVIRONMENT, "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"},
            cwd=folder, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip

    def is_healthy() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        time.sleep(0.5)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
                return reply.status == 200
        except (urllib.error.URLError, TimeoutError):
            return False

    try:
        eventually("the server is healthy", is_healthy, limit_seconds=START_SECONDS)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[EmbeddedCluster]:
    folder = tmp_path_factory.mktemp("stock")
    cluster = EmbeddedCluster(folder / "mesh")
    with running_server(folder, model_folder) as url:
        try:
            cluster.up("--engine=sim", "--workers=1")
            for name, api in ((GENERATE, "generate"), (COMPLETIONS, "completions")):
                arguments = {"url": url, "tokenizer": str(model_folder), "api": api, "max-num-seqs": 8}
                cluster.apply(name, engine={"name": "attached", "arguments": arguments})
            eventually("both are targets", lambda: are_targets(cluster))
            yield cluster
        finally:
            print(cluster.logs())
            cluster.down()


def are_targets(cluster: EmbeddedCluster) -> bool:
    targets = [target for target in cluster.targets().values() if target.model.startswith("stock")]
    return len(targets) == 2 and not any(target.excluded_reason for target in targets)


def ask(cluster: EmbeddedCluster, text: str, *, model: str = GENERATE, **more: Any) -> Any:
    return (
        cluster.client()
        .with_options(timeout=300)
        .chat.completions.create(
            model=model, messages=[{"role": "user", "content": text}], **{"max_tokens": 8, "temperature": 0, **more}
        )
    )


def audit_is_clean(cluster: EmbeddedCluster) -> bool:
    return cluster.run("kv", "audit").returncode == 0


@pytest.mark.parametrize("model", [GENERATE, COMPLETIONS])
def test_the_server_answers_by_either_door(cluster: EmbeddedCluster, model: str) -> None:
    whole = ask(cluster, "What is the capital of France?", model=model, max_tokens=16)
    assert "Paris" in whole.choices[0].message.content
    chunks = ask(cluster, "What is the capital of France?", model=model, max_tokens=16, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content


@pytest.mark.parametrize("model", [GENERATE, COMPLETIONS])
def test_a_prompt_asked_again_is_cached_as_predicted(cluster: EmbeddedCluster, model: str) -> None:
    prompt = f"{model}: {LONG_PROMPT}"
    first = ask(cluster, prompt, model=model)
    blocks = (first.usage.prompt_tokens - 1) // BLOCK_SIZE_TOKENS
    eventually("router, KV master and ledgers agree", lambda: audit_is_clean(cluster))
    again = ask(cluster, prompt, model=model)
    cached = again.usage.prompt_tokens_details.cached_tokens
    decision = cluster.decision(again.id.removeprefix("chatcmpl-"))
    [candidate] = decision.candidates
    # Predicted is what was delivered.
    assert [match.blocks for match in candidate.matches] == [blocks]
    assert decision.receipt.cached_tokens == cached == blocks * BLOCK_SIZE_TOKENS > 0
    explained = cluster.kvist("route", "explain", again.id.removeprefix("chatcmpl-"))
    assert f"{cached} of {again.usage.prompt_tokens} tokens cached" in explained
    assert audit_is_clean(cluster)


def test_both_workers_keep_the_same_account_while_blocks_are_evicted(cluster: EmbeddedCluster) -> None:
    for number in range(6):
        ask(cluster, f"{number}. {LONG_PROMPT}", max_tokens=1)
        eventually("the audit is clean", lambda: audit_is_clean(cluster))
    rows = [row for row in cluster.kv() if row["worker_uid"].startswith("stock")]
    blocks = {row["ledger"]["blocks"] for row in rows}
    assert len(rows) == 2
    assert len(blocks) == 1
    assert 0 < blocks.pop() <= KV_BLOCKS


def test_log_probabilities_and_a_schema(cluster: EmbeddedCluster) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    answer = ask(
        cluster,
        "Name a capital.",
        max_tokens=24,
        logprobs=True,
        top_logprobs=2,
        response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": schema, "strict": True}},
    )
    assert json.loads(answer.choices[0].message.content)["city"] in {"Paris", "Rome"}
    assert all(len(token.top_logprobs) <= 2 and token.logprob <= 0 for token in answer.choices[0].logprobs.content)
    with pytest.raises(openai.APIStatusError) as refused:
        ask(cluster, "Name a capital.", model=COMPLETIONS, logprobs=True)
    assert "logprobs" in refused.value.message


def test_a_salt_is_a_cache_of_its_own(cluster: EmbeddedCluster) -> None:
    prompt = f"salted: {LONG_PROMPT}"
    ask(cluster, prompt, max_tokens=1)
    for expected in (False, True):
        eventually("the audit is clean", lambda: audit_is_clean(cluster))
        answer = ask(cluster, prompt, max_tokens=1, extra_body={"cache_salt": "of one client"})
        assert bool(answer.usage.prompt_tokens_details.cached_tokens) == expected


def test_a_client_that_leaves_frees_the_request(cluster: EmbeddedCluster) -> None:
    stream = ask(cluster, "Count to a thousand.", max_tokens=400, stream=True)
    next(iter(stream))
    stream.close()

    def is_idle() -> bool:
        loads = [target.load for target in cluster.targets().values() if target.model.startswith("stock")]
        return len(loads) == 2 and not any(load.running_requests for load in loads)

    eventually("nothing runs at the server", is_idle)
