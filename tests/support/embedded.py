"""An embedded cluster of real processes on free ports, with its logs shown when a test fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import anthropic
import grpc
import openai

from kvist.events.v1 import events_pb2
from kvist.kvmaster.v1 import kvmaster_pb2, kvmaster_pb2_grpc
from kvist.router.v1 import router_pb2, router_pb2_grpc

LIMIT_SECONDS = 60.0
COMMAND_LIMIT_SECONDS = 180.0

Answer = TypeVar("Answer")


def eventually(what: str, ask: Callable[[], Answer], *, limit_seconds: float = LIMIT_SECONDS) -> Answer:
    """Asks until the answer is true; fails when it never is."""
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        answer = ask()
        if answer:
            return answer
        time.sleep(0.02)
    raise AssertionError(f"never came true: {what}")


class EmbeddedCluster:
    """`kvist up --detach` in a folder of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Runs the command."""
        return subprocess.run(
            [sys.executable, "-m", "kvist.cli", *arguments],
            env={**os.environ, "KVIST_HOME": str(self.home), "NO_COLOR": "1"},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_SECONDS,
            check=False,
        )

    def kvist(self, *arguments: str, code: int = 0, stdin: str | None = None) -> str:
        """Runs the command and returns all that it printed."""
        done = self.run(*arguments, stdin=stdin)
        assert code == done.returncode, f"{arguments}: {done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout + done.stderr

    def json(self, *arguments: str) -> Any:
        """What a command prints as JSON."""
        return json.loads(self.run(*arguments).stdout)

    def up(self, *arguments: str) -> None:
        self.kvist("up", "--http-port=0", "--grpc-port=0", *arguments, "--detach")

    def down(self) -> None:
        if self.record().get("phase") == "ready":
            self.kvist("down")

    def record(self) -> dict[str, Any]:
        try:
            return json.loads((self.home / "cluster.json").read_text())
        except FileNotFoundError:
            return {}

    def address(self, name: str) -> str:
        return self.record()["addresses"][name]

    def process_id(self, name: str) -> int:
        return self.record()["process_ids"][name]

    def kill(self, name: str) -> None:
        """Kills one of the supervisor's processes."""
        os.kill(self.process_id(name), signal.SIGKILL)

    def workers(self, model: str = "") -> dict[str, dict[str, Any]]:
        """Workers by UID, as `kvist status --json` shows them."""
        workers = self.json("status", "--json")["workers"]
        return {worker["worker_uid"]: worker for worker in workers if not model or worker["model"] == model}

    def apply(self, name: str, *arguments: str, code: int = 0, **spec: Any) -> str:
        """Applies a model service on the simulated engine."""
        manifest = {
            "apiVersion": "kvist.dev/v1alpha1",
            "kind": "ModelService",
            "metadata": {"name": name},
            "spec": {"engine": {"name": "sim"}, "drainTimeout": "5s", **spec},
        }
        return self.kvist("apply", "-f", "-", *arguments, code=code, stdin=json.dumps(manifest))

    def kv(self) -> list[dict[str, Any]]:
        """What `kvist kv status --json` says of each source."""
        return self.json("kv", "status", "--json")["sources"]

    def kv_is_equal(self, sources: int) -> bool:
        """Whether so many sources are exact in router and KV master, with the digests of their ledgers."""
        done = self.run("kv", "status", "--json")
        if done.returncode:
            return False
        rows = json.loads(done.stdout)["sources"]
        return len(rows) == sources and all(
            row["verdict"] == "EQUAL" and row["router"]["state"] == "EXACT" == row["kvmaster"]["state"] for row in rows
        )

    def client(self) -> openai.OpenAI:
        """The official client, which must not try again by itself."""
        return openai.OpenAI(base_url=f"http://{self.address('http')}/v1", api_key="none", max_retries=0, timeout=60)

    def anthropic_client(self) -> anthropic.Anthropic:
        """The official client of the other API, which must not try again by itself."""
        return anthropic.Anthropic(base_url=f"http://{self.address('http')}", api_key="none", max_retries=0, timeout=60)

    @contextmanager
    def router(self) -> Iterator[router_pb2_grpc.RouterServiceStub]:
        with grpc.insecure_channel(self.address("router")) as channel:
            yield router_pb2_grpc.RouterServiceStub(channel)

    def targets(self) -> dict[str, router_pb2.TargetStatus]:
        """What the router may choose, by worker UID."""
        with self.router() as router:
            listed = router.ListTargets(router_pb2.ListTargetsRequest(), timeout=10).targets
        return {target.target.worker_uid: target for target in listed}

    def busy_worker(self) -> str:
        """UID of the one worker that has a reservation."""
        busy = [uid for uid, target in self.targets().items() if target.reservations]
        assert 1 == len(busy)
        return busy[0]

    def reservations(self) -> int:
        return sum(target.reservations for target in self.targets().values())

    def known_incarnations(self) -> set[int]:
        """Starts of engines of which the router's or the KV master's index holds anything."""
        with self.router() as router, grpc.insecure_channel(self.address("kvmaster")) as channel:
            in_router = router.ListSources(router_pb2.ListSourcesRequest(), timeout=10).sources
            stats = kvmaster_pb2_grpc.KvMasterServiceStub(channel).Stats(kvmaster_pb2.StatsRequest(), timeout=10)
        return {source.source.incarnation for source in (*in_router, *stats.sources)}

    def decision(self, request_id: str) -> events_pb2.DecisionRecord:
        """The last decision of a request. Records are finished a moment after the answer."""
        request = router_pb2.ExplainRequest(request_id=request_id)
        with self.router() as router:
            return eventually(
                f"the record of {request_id} has an outcome",
                lambda: (record := router.Explain(request, timeout=10).decisions[-1]).outcome and record,
                limit_seconds=10,
            )

    def logs(self) -> str:
        paths = sorted([*self.home.glob("logs/*.log"), *self.home.glob("agent/slots/*/worker.log")])
        return "\n".join(f"--- {path.relative_to(self.home)}\n{path.read_text()[-2000:]}" for path in paths)


def chosen_worker(decision: events_pb2.DecisionRecord) -> str:
    """UID of the worker that a request went to."""
    return decision.candidates[decision.chosen_candidate].worker_uid
