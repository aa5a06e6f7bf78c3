"""The programs that the chart brings along do in a pod what it says of them."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from google.protobuf import any_pb2, json_format
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvist.controller.v1 import controller_pb2, controller_pb2_grpc
from kvist.settings import load
from kvist_worker.settings import WorkerSettings
from support.certificates import authority, files_of

TIME_LIMIT_SECONDS = 60
SIM = {"name": "sim", "labels": {"team": "search"}, "spec": {"engine": {"name": "sim"}, "replicas": 2}}
# As kvist_agent.slot writes them.
AGENT_SETTINGS = {
    "worker_uid": "sim-0",
    "model": "sim",
    "namespace": "sim",
    "pool_uid": "pool-1",
    "pool_revision": "r1",
    "role": 1,
    "hash_seed": 2**63 + 1,
    "incarnation_floor": 7,
    "drain_time_limit_ms": 30_000,
    "engine": "sim",
    "engine_arguments": {"blocks": 4096.0},
    "grpc_listen": "0.0.0.0:0",
    "admin_listen": "0.0.0.0:0",
    "insecure": True,
}
FAKE_WORKER = "import json, os, sys\nprint(json.dumps([os.getpid(), sys.argv[1:]]))\n"


def run(program, *arguments, environment=None):
    with subprocess.Popen(
        [sys.executable, program, *map(str, arguments)],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=TIME_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process, output, errors


def unpack(rendered, component, folder):
    """Writes the files of a ConfigMap as a volume shows them."""
    for name, text in rendered.one("ConfigMap", component)["data"].items():
        (folder / name).write_text(text)


def test_a_worker_gets_what_its_agent_says_and_what_all_share(helm, tmp_path):
    unpack(helm.render({"worker": {"settings": {"digest_interval_ms": 500}}}), "worker", tmp_path)
    (tmp_path / "python" / "kvist_worker").mkdir(parents=True)
    (tmp_path / "python" / "kvist_worker" / "__init__.py").touch()
    (tmp_path / "python" / "kvist_worker" / "__main__.py").write_text(FAKE_WORKER)
    given, ready = tmp_path / "settings.json", tmp_path / "ready.json"
    given.write_text(json.dumps(AGENT_SETTINGS))
    process, output, errors = run(
        tmp_path / "start_worker.py",
        "--settings-file",
        given,
        "--ready-file",
        ready,
        environment={"PYTHONPATH": str(tmp_path / "python")},
    )
    assert process.returncode == 0, errors
    process_id, (flag, file, *rest) = json.loads(output)
    # The agent watches the process that it has started.
    assert process_id == process.pid
    assert (flag, rest) == ("--settings-file", ["--ready-file", str(ready)])
    settings = load(WorkerSettings, file=tmp_path / file, environment={}).settings
    assert (settings.digest_interval_ms, settings.telemetry.log_format) == (500, "json")
    assert settings.model_dump(include=set(AGENT_SETTINGS)) == AGENT_SETTINGS


class RecordingController(controller_pb2_grpc.ControllerServiceServicer):
    """Takes every resource but those that it was told to refuse."""

    def __init__(self, *, refused=()):
        self.applied = []
        self._refused = refused

    def Apply(self, request, context):  # noqa: N802
        name = request.resource.metadata.name
        if name in self._refused:
            detail = any_pb2.Any()
            violations = [{"field": "spec.replicas", "description": "must be less"}]
            detail.Pack(json_format.ParseDict({"fieldViolations": violations}, error_details_pb2.BadRequest()))
            status = status_pb2.Status(
                code=grpc.StatusCode.INVALID_ARGUMENT.value[0], message="the manifest is wrong", details=[detail]
            )
            context.abort_with_status(rpc_status.to_status(status))
        self.applied.append(request.resource)
        return controller_pb2.ApplyResponse(result=controller_pb2.APPLY_RESULT_CREATED)


@contextlib.contextmanager
def serving(controller, *, credentials=None):
    server = grpc.server(futures.ThreadPoolExecutor(2))
    controller_pb2_grpc.add_ControllerServiceServicer_to_server(controller, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait(TIME_LIMIT_SECONDS)


def job_of(rendered):
    (job,) = rendered.of_kind("Job")
    return job


def test_model_services_reach_the_controller(helm, tmp_path):
    rendered = helm.render({"modelServices": [SIM, {**SIM, "name": "other"}]})
    unpack(rendered, "model-services", tmp_path)
    controller = RecordingController()
    with serving(controller) as address:
        process, output, errors = run(tmp_path / "apply_model_services.py", tmp_path / "model-services.json", address)
    assert (process.returncode, errors) == (0, "")
    assert output == "sim: created\nother: created\n"
    assert json_format.MessageToDict(controller.applied[0]) == {
        "apiVersion": "kvist.dev/v1alpha1",
        "kind": "ModelService",
        "metadata": {"name": "sim", "labels": {"team": "search"}},
        "spec": {"engine": {"name": "sim"}, "replicas": 2.0},
    }


def test_a_refused_model_service_fails_the_job_and_says_which_field(helm, tmp_path):
    rendered = helm.render({"modelServices": [SIM, {**SIM, "name": "other"}]})
    unpack(rendered, "model-services", tmp_path)
    controller = RecordingController(refused=("sim",))
    with serving(controller) as address:
        process, _, errors = run(tmp_path / "apply_model_services.py", tmp_path / "model-services.json", address)
    assert process.returncode == 1
    assert errors == "sim: refused\nthe manifest is wrong (INVALID_ARGUMENT)\n  spec.replicas: must be less\n"
    assert controller.applied == []


def test_the_job_runs_after_each_install_and_upgrade(helm):
    job = job_of(helm.render({"modelServices": [SIM]}))
    assert job["metadata"]["annotations"] == {
        "helm.sh/hook": "post-install,post-upgrade",
        "helm.sh/hook-delete-policy": "before-hook-creation,hook-succeeded",
    }
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "/etc/kvist/apply_model_services.py"]
    assert container["args"] == ["/etc/kvist/model-services.json", "mesh-kvist-controller.serving.svc:7100"]
    assert helm.render({}).of_kind("Job") == []


def test_the_job_verifies_the_controller_when_there_is_tls(helm):
    values = {
        "modelServices": [SIM],
        "tls": {"enabled": True, "existingSecret": "mesh-tls"},
    }
    (container,) = job_of(helm.render(values))["spec"]["template"]["spec"]["containers"]
    assert container["args"][-1] == "/etc/kvist-tls/ca.crt"
    assert {"name": "tls", "mountPath": "/etc/kvist-tls", "readOnly": True} in container["volumeMounts"]


def test_with_roles_the_job_is_an_operator(helm, role_tls, tmp_path):
    rendered = helm.render({**role_tls, "modelServices": [SIM]})
    (container,) = job_of(rendered)["spec"]["template"]["spec"]["containers"]
    names = [argument.removeprefix("/etc/kvist-tls/") for argument in container["args"][2:]]
    assert names == ["ca.crt", "tls.crt", "tls.key"]
    pki = authority(tmp_path / "pki")
    server = files_of(pki, "controller")
    credentials = grpc.ssl_server_credentials(
        [(server.key_file.read_bytes(), server.certificate_file.read_bytes())],
        root_certificates=server.ca_file.read_bytes(),
        require_client_auth=True,
    )
    operator = files_of(pki, "operator")
    files = dict(zip(names, (operator.ca_file, operator.certificate_file, operator.key_file), strict=True))
    unpack(rendered, "model-services", tmp_path)
    controller = RecordingController()
    with serving(controller, credentials=credentials) as address:
        program, resources = tmp_path / "apply_model_services.py", tmp_path / "model-services.json"
        process, _, errors = run(program, resources, address, *files.values())
    assert (process.returncode, errors) == (0, "")
    assert ["sim"] == [resource.metadata.name for resource in controller.applied]


class Answering(BaseHTTPRequestHandler):
    """A mesh whose KV master is not ready."""

    def do_GET(self):
        self._answer(503 if "kvmaster" in self.path else 200)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, body["model"]))
        self._answer(200)

    def _answer(self, status):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b"a reason")

    def log_message(self, *_):
        pass


@pytest.fixture
def mesh():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(TIME_LIMIT_SECONDS)


def test_the_check_asks_every_service_and_the_model(helm, tmp_path, mesh):
    server, url = mesh
    rendered = helm.render({"modelServices": [SIM]})
    unpack(rendered, "test", tmp_path)
    (pod,) = rendered.of_kind("Pod")
    flags = pod["spec"]["containers"][0]["args"]
    assert flags == [
        "--ready=http://mesh-kvist-router.serving.svc:80/readyz",
        "--ready=http://mesh-kvist-controller:9090/readyz",
        "--ready=http://mesh-kvist-kvmaster:9090/readyz",
        "--router=http://mesh-kvist-router.serving.svc:80",
        "--model=sim",
    ]
    arguments = [f"--ready={url}/router", f"--router={url}", "--model=sim"]
    process, output, errors = run(tmp_path / "check_services.py", *arguments)
    assert process.returncode == 0, errors
    assert output == f"{url}/router: ok\n{url}/v1/chat/completions: ok\n"
    assert server.asked == [("/v1/chat/completions", "sim")]


def test_the_check_verifies_routers_that_speak_tls(helm):
    rendered = helm.render({"modelServices": [SIM], "tls": {"enabled": True, "existingSecret": "mesh-tls"}})
    (pod,) = rendered.of_kind("Pod")
    (container,) = pod["spec"]["containers"]
    assert container["args"][:2] == [
        "--ca-file=/etc/kvist-tls/ca.crt",
        "--ready=https://mesh-kvist-router.serving.svc:80/readyz",
    ]
    assert "--router=https://mesh-kvist-router.serving.svc:80" in container["args"]
    assert {"name": "tls", "mountPath": "/etc/kvist-tls", "readOnly": True} in container["volumeMounts"]


def test_the_check_fails_with_what_the_service_says(helm, tmp_path, mesh):
    _, url = mesh
    unpack(helm.render({}), "test", tmp_path)
    process, _, errors = run(tmp_path / "check_services.py", f"--ready={url}/kvmaster", "--time-limit-seconds=0")
    assert process.returncode == 1
    assert errors == f"{url}/kvmaster: status 503: a reason\n"


def test_the_check_asks_no_model_that_wants_a_key(helm):
    values = {"modelServices": [SIM], "router": {"apiKeys": {"existingSecret": "keys"}}}
    (pod,) = helm.render(values).of_kind("Pod")
    assert not any(flag.startswith("--model") for flag in pod["spec"]["containers"][0]["args"])
