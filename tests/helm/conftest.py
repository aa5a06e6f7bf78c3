"""Renders the chart with a real helm, once for each set of values."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.helm_binary import ROOT, HelmMissingError, find_helm

CHART = ROOT / "helm" / "kvist"
TIME_LIMIT_SECONDS = 60


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice: a server-side apply does as well."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key in {keys}", node.start_mark)
        return super().construct_mapping(node, deep)


@dataclass(frozen=True, slots=True)
class Rendered:
    """What one set of values makes of the chart."""

    objects: list[dict[str, Any]]

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [item for item in self.objects if item["kind"] in kinds]

    def one(self, kind: str, component: str) -> dict[str, Any]:
        (found,) = [item for item in self.of_kind(kind) if item["metadata"]["name"].endswith(f"-{component}")]
        return found

    def file(self, component: str, name: str) -> str:
        return self.one("ConfigMap", component)["data"][name]

    def workloads(self) -> list[dict[str, Any]]:
        """What runs for good."""
        return self.of_kind("Deployment", "DaemonSet", "StatefulSet")

    def pods(self) -> list[tuple[str, dict[str, Any]]]:
        """(name, pod template) of everything that runs."""
        pods = [
            (item["metadata"]["name"], item["spec"]["template"])
            for item in self.of_kind("Deployment", "DaemonSet", "StatefulSet", "Job")
        ]
        return pods + [(item["metadata"]["name"], item) for item in self.of_kind("Pod")]


class Helm:
    """Runs helm on the chart."""

    def __init__(self, binary: Path, home: Path) -> None:
        self._binary = binary
        self._home = home
        self._rendered: dict[str, Rendered] = {}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HELM_", "KUBE"))}
        environment |= {f"HELM_{name}_HOME": str(self._home / name) for name in ("CACHE", "CONFIG", "DATA")}
        return subprocess.run(
            [self._binary, *arguments],
            capture_output=True,
            check=False,
            env=environment,
            text=True,
            timeout=TIME_LIMIT_SECONDS,
        )

    def template(
        self, values: Mapping[str, Any], *, release: str = "mesh", namespace: str = "serving"
    ) -> subprocess.CompletedProcess[str]:
        path = self._home / "values.json"
        path.write_text(json.dumps(values))
        return self.run("template", release, str(CHART), f"--namespace={namespace}", f"--values={path}")

    def render(self, values: Mapping[str, Any], *, release: str = "mesh", namespace: str = "serving") -> Rendered:
        key = json.dumps([values, release, namespace], sort_keys=True)
        if key not in self._rendered:
            done = self.template(values, release=release, namespace=namespace)
            assert done.returncode == 0, done.stderr
            documents = yaml.load_all(done.stdout, Loader=StrictLoader)
            self._rendered[key] = Rendered([document for document in documents if document])
        return self._rendered[key]

    def refusal(self, values: Mapping[str, Any]) -> str:
        done = self.template(values)
        assert done.returncode != 0, "the values were taken"
        return done.stderr


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    try:
        binary = find_helm(os.environ)
    except HelmMissingError as reason:
        pytest.skip(str(reason))
    return Helm(binary, tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def chart() -> Path:
    return CHART


SIM = {"name": "sim", "spec": {"engine": {"name": "sim"}, "replicas": 2}}
PEERS = [{"namespaceSelector": {"matchLabels": {"team": "web"}}}]


def _pod(name: str) -> dict[str, Any]:
    """Every way out of the chart's own choices."""
    return {
        "annotations": {"example.com/note": name},
        "labels": {"example.com/team": "serving"},
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "priorityClassName": "high",
        "extraEnv": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4317"}],
        "extraVolumes": [{"name": "models", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
    }


ROLES = ("router", "controller", "kvmaster", "agent", "worker", "operator")
ROLE_TLS = {"tls": {"enabled": True, "roleSecrets": {role: f"{role}-tls" for role in ROLES}}}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "model services": {
        "modelServices": [
            SIM,
            {
                "name": "smollm2",
                "labels": {"team": "search"},
                "spec": {
                    "model": "HuggingFaceTB/SmolLM2-135M",
                    "engine": {"name": "llamacpp", "arguments": {"slots": 4, "contextTokens": 4096}},
                    "aliases": ["smollm2"],
                    "role": "aggregate",
                    "drainTimeout": "1.5m",
                    "startupTimeout": "10m",
                    "tokenizerDigest": "0" * 64,
                    "hashUnitTokens": 32,
                },
            },
        ]
    },
    "external NATS": {"nats": {"bundled": False, "urls": ["nats://nats-0.msg.svc:4222", "nats://nats-1.msg.svc:4222"]}},
    "locked NATS": {
        "nats": {
            "bundled": False,
            "urls": ["tls://nats.msg.svc:4222"],
            "caSecret": "nats-ca",
            "credentialsSecret": "nats-creds",
        }
    },
    "no events": {"nats": {"bundled": False}, "kvmaster": {"enabled": False}},
    "TLS": {
        "tls": {"enabled": True, "existingSecret": "mesh-tls"},
        "modelServices": [SIM],
    },
    "roles": {**ROLE_TLS, "modelServices": [SIM]},
    "TLS and several controllers": {
        "listenHost": "[::]",
        "tls": {"enabled": True, "existingSecret": "mesh-tls"},
        "store": {"kind": "etcd", "etcd": {"endpoints": ["etcd:2379"]}},
        "controller": {"replicas": 2},
        "kvmaster": {"replicas": 2},
    },
    "IPv6": {"listenHost": "[::]"},
    "API keys": {"router": {"apiKeys": {"existingSecret": "keys", "key": "clients.txt"}}, "modelServices": [SIM]},
    "no volume": {"controller": {"persistence": {"enabled": False}}},
    "own volume": {"controller": {"persistence": {"existingClaim": "my-claim"}}},
    "storage class": {"controller": {"persistence": {"storageClassName": "fast", "size": "5Gi"}}},
    "etcd": {
        "store": {
            "kind": "etcd",
            "etcd": {
                "endpoints": ["etcd-0.db.svc:2379", "etcd-1.db.svc:2379"],
                "namespace": "/team-a",
                "tls": {"existingSecret": "etcd-tls", "clientCertificate": True},
                "username": "kvist",
                "passwordSecret": "etcd-password",
            },
        },
        "controller": {"replicas": 3},
        "kvmaster": {"replicas": 2},
    },
    "plain etcd": {"store": {"kind": "etcd", "etcd": {"endpoints": ["etcd:2379"]}}, "kvmaster": {"enabled": False}},
    "autoscaler": {"router": {"replicas": None}},
    "load balancer": {
        "router": {
            "service": {"type": "LoadBalancer", "annotations": {"example.com/internal": "true"}, "httpPort": 8080},
            "podDisruptionBudget": {"maxUnavailable": "25%"},
        }
    },
    "no budget": {"router": {"podDisruptionBudget": {"enabled": False}}},
    "network policy": {"networkPolicy": {"enabled": True}, "modelServices": [SIM]},
    "network policy with peers": {
        "networkPolicy": {"enabled": True, "clients": PEERS, "operators": PEERS, "monitoring": PEERS},
    },
    "image by digest": {
        "image": {"repository": "r.example.com/k", "digest": "sha256:" + "a" * 64, "pullSecrets": [{"name": "pull"}]},
        "nats": {"image": {"digest": "sha256:" + "b" * 64}},
    },
    "own service account": {"serviceAccount": {"create": False, "name": "mesh-identity"}},
    "default service account": {"serviceAccount": {"create": False}},
    "own pods": {name: {"pod": _pod(name)} for name in ("router", "controller", "kvmaster", "agent", "nats")},
    "every setting": {
        "clusterName": "prod_eu-1",
        "telemetry": {"log_level": "debug", "log_format": "console"},
        "router": {
            "settings": {
                "index_byte_budget": 4_294_967_296,
                "default_deadline_seconds": 0.5,
                "body_limit_bytes": 1024,
                "cors_allowed_origins": ["https://chat.example.com"],
                "first_token_timeout_seconds": 0,
                "token_timeout_seconds": 7.5,
                "body_timeout_seconds": 3,
                "write_timeout_seconds": 4,
                "upstreams": [
                    {
                        "name": "example",
                        "url": "https://api.example.com/v1",
                        "models": {"large": "example-large-2"},
                        "api_key_file": "/etc/kvist-keys/example",
                        "tls_ca_file": "/etc/kvist-keys/ca.pem",
                        "connect_timeout_seconds": 2.5,
                    }
                ],
                "drain_seconds": 12.5,
                "worker_threads": 8,
                "text_threads": 4,
            },
            # Where the files of the upstreams come from.
            "pod": {
                "extraVolumes": [{"name": "provider-keys", "secret": {"secretName": "provider-keys"}}],
                "extraVolumeMounts": [{"name": "provider-keys", "mountPath": "/etc/kvist-keys", "readOnly": True}],
            },
        },
        "controller": {
            "settings": {
                "grpc": {
                    "max_message_bytes": 134_217_728,
                    "max_calls_at_once": 64,
                    "max_calls_per_second": 9.5,
                    "reflection": False,
                },
                "leader_lease_seconds": 0.5,
                "registry": {"lease_seconds": 5, "heartbeat_interval_seconds": 0.5, "replace_after_seconds": 0},
            }
        },
        "kvmaster": {
            "settings": {
                "grpc": {
                    "max_message_bytes": 134_217_728,
                    "max_calls_at_once": 64,
                    "max_calls_per_second": 9.5,
                    "reflection": False,
                },
                "index_byte_budget": 4_294_967_296,
                "worker_threads": 8,
            }
        },
        "agent": {
            "settings": {
                "grpc": {
                    "max_message_bytes": 134_217_728,
                    "max_calls_at_once": 64,
                    "max_calls_per_second": 9.5,
                    "reflection": False,
                },
                "labels": {"zone": "a", "number": "1"},
                "workers": {"engines": ["sim", "llamacpp"]},
            }
        },
        "worker": {
            "settings": {
                "ring_batches": 1,
                "digest_interval_ms": 10,
                "generate_buffer_tokens": 1,
                "runtime_threads": 64,
            }
        },
    },
}


@pytest.fixture(scope="session")
def role_tls() -> dict[str, Any]:
    """Values that give each role a Secret of its own, named after it."""
    return ROLE_TLS


@pytest.fixture(params=VARIANTS, scope="session")
def variant(request: pytest.FixtureRequest, helm: Helm) -> Rendered:
    """The chart with one notable set of values."""
    return helm.render(VARIANTS[request.param])
