"""Settings of the router: where it learns the cluster from, and where it may listen."""

import json
from pathlib import Path

import pytest

from kvist.settings import SettingsError, load
from kvist_router.app import core_settings
from kvist_router.settings import RouterSettings


def read(**flags: object) -> RouterSettings:
    return load(RouterSettings, environment={}, flags=flags).settings


def test_the_core_gets_what_was_set() -> None:
    settings = read(
        **{"controllers": "a:1,b:2", "bus.urls": "nats://x:1,nats://y:2", "default_deadline_seconds": "2.5"}
    )
    assert settings.controllers == ("a:1", "b:2")
    core = core_settings(settings)
    assert core["nats_url"] == "nats://x:1,nats://y:2"
    assert core["default_deadline_ms"] == 2500
    assert "api_keys_file" not in core
    assert "nats_credentials_file" not in core


def test_the_core_gets_the_files_of_the_bus() -> None:
    files = {"bus.credentials_file": "/k/user.creds", "bus.tls_ca_file": "/k/ca.pem"}
    core = core_settings(read(**{"controllers": "a:1", "bus.urls": "tls://x:1", **files}))
    assert (core["nats_credentials_file"], core["nats_tls_ca_file"]) == ("/k/user.creds", "/k/ca.pem")


def test_the_core_gets_the_routing_that_was_set(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("""
controllers: [a:1]
routing:
  scorers:
    - {algorithm: prefix, weight: 2, parameters: {matchLengthWeight: 0.5}}
    - {algorithm: queue_depth}
  picker: {algorithm: softmax}
""")
    settings = load(RouterSettings, file=file, environment={}).settings
    assert core_settings(settings)["routing"] == {
        "scorers": [
            {"algorithm": "prefix", "weight": 2, "parameters": {"matchLengthWeight": 0.5}},
            {"algorithm": "queue_depth"},
        ],
        "picker": {"algorithm": "softmax"},
    }
    assert core_settings(read(controllers="a:1"))["routing"] == {}


def test_the_core_gets_the_admission_that_was_set() -> None:
    assert core_settings(read(controllers="a:1"))["admission"] == "allow_all"
    limited = {"concurrency": {"maxConcurrentRequests": 4, "maxQueuedRequests": 9}}
    assert core_settings(read(controllers="a:1", admission=json.dumps(limited)))["admission"] == limited
    with pytest.raises(SettingsError, match="maxConcurrentRequests"):
        read(controllers="a:1", admission='{"concurrency": {}}')


def test_a_pipeline_that_there_is_not_stops_the_start_and_says_what_there_is() -> None:
    with pytest.raises(SettingsError, match=r"unknown picker .*valid: max, gamble_sampling"):
        read(controllers="a:1", routing='{"picker": {"algorithm": "round_robin"}}')


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"controllers": "a:1", "cluster_state_file": "x.json"},
        {"controllers": "a:1", "http_listen": "0.0.0.0:80"},
        {"controllers": "a:1", "grpc_listen": "nowhere"},
        {"controllers": "a:1", "name": "no spaces"},
    ],
)
def test_what_makes_no_sense_is_refused(flags: dict) -> None:
    with pytest.raises(SettingsError):
        read(**flags)


def test_off_loopback_needs_a_word() -> None:
    assert read(controllers="a:1", http_listen="0.0.0.0:80", insecure="true").insecure


CERTIFICATE = {"tls_certificate_file": "/k/router.crt", "tls_key_file": "/k/router.key"}


def test_both_listeners_have_the_certificate_and_the_edge_may_have_its_own() -> None:
    off_loopback = {"controllers": "a:1", "http_listen": "10.0.0.1:8000", "grpc_listen": "10.0.0.1:7000"}
    core = core_settings(
        read(**off_loopback, **CERTIFICATE, tls_client_ca_file="/k/ca.crt", tls_client_optional="true")
    )
    assert core["grpc_door"] == {
        **CERTIFICATE,
        "tls_client_ca_file": "/k/ca.crt",
        "tls_client_optional": True,
        "tls_role_uri": "",
        "open_services": ["health", "reflection"],
        "reflection": True,
    }
    # Clients of the edge show API keys.
    assert core["http_door"] == CERTIFICATE
    own = {"http_tls_certificate_file": "/k/edge.crt", "http_tls_key_file": "/k/edge.key"}
    core = core_settings(read(**off_loopback, **CERTIFICATE, **own, http_tls_client_ca_file="/k/people.crt"))
    assert core["http_door"] == {
        "tls_certificate_file": "/k/edge.crt",
        "tls_key_file": "/k/edge.key",
        "tls_client_ca_file": "/k/people.crt",
    }


def test_workers_are_called_with_the_routers_certificate() -> None:
    assert "tls" not in core_settings(read(controllers="a:1", **CERTIFICATE))
    core = core_settings(read(controllers="a:1", tls_ca_file="/k/ca.crt", **CERTIFICATE))
    assert core["tls"] == {"tls_ca_file": "/k/ca.crt", "tls_role_uri": "", **CERTIFICATE}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"http_listen": "10.0.0.1:8000"}, "10.0.0.1:8000 is not loopback"),
        ({"grpc_listen": "10.0.0.1:7000", "http_tls_certificate_file": "a", "http_tls_key_file": "b"}, "10.0.0.1:7000"),
        ({"http_tls_key_file": "b"}, "go together"),
        ({"http_tls_client_ca_file": "b"}, "needs http_tls_certificate_file"),
        ({"tls_client_optional": "true"}, "needs tls_client_ca_file"),
    ],
)
def test_doors_that_cannot_be_meant_are_refused(flags: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        read(controllers="a:1", **flags)
