"""Values: a typo, a wrong type or values that do not fit each other are refused before anything is installed."""

import copy
import json
from typing import get_args

import pytest
import yaml

SIM = {"name": "sim", "spec": {"engine": {"name": "sim"}}}


def sim(**spec):
    return {"modelServices": [{"name": "sim", "spec": {"engine": {"name": "sim"}, **spec}}]}


def etcd(**more):
    return {"store": {"kind": "etcd", "etcd": {"endpoints": ["etcd:2379"], **more}}}


REFUSED = {
    "a typo at the top": ({"rooter": {}}, "'rooter' not allowed"),
    "a typo in a section": ({"router": {"replica": 2}}, "'replica' not allowed"),
    "a typo in a setting": ({"router": {"settings": {"drain_second": 2}}}, "'drain_second' not allowed"),
    "a typo in a nested setting": ({"controller": {"settings": {"registry": {"lease": 2}}}}, "'lease' not allowed"),
    "a typo in a pod": ({"agent": {"pod": {"nodeselector": {}}}}, "'nodeselector' not allowed"),
    "a typo in resources": ({"agent": {"resources": {"limit": {}}}}, "'limit' not allowed"),
    "a typo in a model service": (sim(replica=2), "'replica' not allowed"),
    "a setting that is the chart's": ({"router": {"settings": {"http_listen": "0.0.0.0:1"}}}, "not allowed"),
    "a setting of another process": ({"kvmaster": {"settings": {"drain_seconds": 1}}}, "not allowed"),
    "a typo in a stage of routing": ({"router": {"settings": {"routing": {"pickers": {}}}}}, "'pickers' not allowed"),
    "an admission that there is not": ({"router": {"settings": {"admission": {"limit": 1}}}}, "'limit' not allowed"),
    "a stage of routing without a name": ({"router": {"settings": {"routing": {"picker": {}}}}}, "'algorithm'"),
    "a text for a number": ({"router": {"replicas": "two"}}, "got string"),
    "a number for a text": ({"clusterName": 7}, "got number"),
    "a text for a switch": ({"tls": {"enabled": "yes"}}, "got string"),
    "a fraction of a byte": ({"router": {"settings": {"index_byte_budget": 1.5e6 + 0.5}}}, "want integer"),
    "a number below its bound": ({"router": {"settings": {"index_byte_budget": 1}}}, "minimum"),
    "a number above its bound": ({"router": {"settings": {"drain_seconds": 3_601}}}, "maximum"),
    "a level that is none": ({"telemetry": {"log_level": "loud"}}, "must be one of"),
    "a cluster's name with a dot": ({"clusterName": "a.b"}, "does not match pattern"),
    "a floating image": ({"image": {"tag": "latest"}}, "'not' failed"),
    "a digest that is none": ({"image": {"digest": "sha256:12"}}, "does not match pattern"),
    "an address that is not NATS": ({"nats": {"bundled": False, "urls": ["http://a"]}}, "does not match pattern"),
    "an engine that is none": ({"modelServices": [{"name": "a", "spec": {"engine": {"name": "gpt"}}}]}, "one of"),
    "a model service without an engine": ({"modelServices": [{"name": "a", "spec": {}}]}, "missing property 'engine'"),
    "a duration without a unit": (sim(drainTimeout="30"), "does not match pattern"),
    "a model service given twice": ({"modelServices": [SIM, SIM]}, "sim is given more than once"),
    "two kinds of NATS": ({"nats": {"urls": ["nats://a:4222"]}}, "set nats.bundled to false"),
    "credentials for the bundled NATS": ({"nats": {"credentialsSecret": "creds"}}, "servers of your own"),
    "an authority of the bundled NATS": ({"nats": {"caSecret": "ca"}}, "servers of your own"),
    "a KV master without NATS": ({"nats": {"bundled": False}}, "the KV master needs NATS"),
    "two controllers on one file": ({"controller": {"replicas": 2}}, "needs store.kind etcd"),
    "two KV masters on one file": ({"kvmaster": {"replicas": 2}}, "needs store.kind etcd"),
    "etcd nowhere": ({"store": {"kind": "etcd"}}, "go together"),
    "members of an etcd that is not used": ({"store": {"etcd": {"endpoints": ["a:1"]}}}, "go together"),
    "a user of etcd without a password": (etcd(username="kvist"), "passwordSecret go together"),
    "a certificate for etcd from nowhere": (etcd(tls={"clientCertificate": True}), "needs store.etcd.tls"),
    "TLS without a secret": ({"tls": {"enabled": True}}, "tls.existingSecret"),
    "roles without TLS": ({"tls": {"roleSecrets": {"router": "a"}}}, "needs tls.enabled"),
    "one role alone": ({"tls": {"enabled": True, "roleSecrets": {"router": "a"}}}, "tls.roleSecrets.agent is missing"),
    "a secret for all and for each": (
        {"tls": {"enabled": True, "existingSecret": "a", "roleSecrets": {"router": "b"}}},
        "give one of the two",
    ),
    "a role that there is not": ({"tls": {"roleSecrets": {"client": "a"}}}, "'client' not allowed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_values_are_refused_with_the_reason(helm, name):
    values, reason = REFUSED[name]
    assert reason in helm.refusal(values)


def objects(schema, path=""):
    """(path, schema) of every object inside a schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield path, schema
        for key, part in schema.items():
            yield from objects(part, f"{path}/{key}")
    elif isinstance(schema, list):
        for part in schema:
            yield from objects(part, path)


# What Kubernetes, Helm or an engine checks.
FREE = {
    "/properties/global",
    "/properties/podSecurityContext",
    "/properties/securityContext",
    "/definitions/objects/items",
    "/definitions/pod/properties/affinity",
    "/definitions/modelServiceSpec/properties/engine/properties/arguments",
    "/definitions/modelServiceSpec/properties/pools/items/properties/engineArgs",
}


def test_every_object_of_the_schema_is_closed(chart):
    schema = json.loads((chart / "values.schema.json").read_text())
    free = {path for path, part in objects(schema) if part.get("additionalProperties", True) is True}
    assert free == FREE


def test_every_value_is_one_that_the_schema_names_and_each_name_has_a_value(chart):
    values = yaml.safe_load((chart / "values.yaml").read_text())
    schema = json.loads((chart / "values.schema.json").read_text())
    named = copy.deepcopy(schema["properties"])
    del named["global"]
    assert set(values) == set(named)
    # Settings that are absent have the process's default, so they are free to be missing.
    for section in (
        "router",
        "controller",
        "kvmaster",
        "agent",
        "worker",
        "nats",
        "serviceAccount",
        "networkPolicy",
        "store",
    ):
        assert set(values[section]) == set(named[section]["properties"]), section


def test_every_value_is_explained(chart):
    lines = (chart / "values.yaml").read_text().splitlines()
    explained_once = {"annotations", "labels", "nodeSelector", "tolerations", "affinity", "priorityClassName"}
    explained_once |= {"extraEnv", "extraVolumes", "extraVolumeMounts", "requests", "limits"}
    silent = []
    for number, line in enumerate(lines):
        key = line.strip().partition(":")[0]
        if not line.strip() or line.lstrip().startswith("#") or ":" not in line or key in explained_once:
            continue
        # A section may also be explained by its first key.
        if not lines[number - 1].lstrip().startswith("#") and not lines[number + 1].lstrip().startswith("#"):
            silent.append(line)
    in_security_contexts = ("runAs", "fsGroup", "seccomp", "allowPriv", "readOnlyRoot", "capabilities")
    assert [line for line in silent if not line.strip().startswith(in_security_contexts)] == []


def test_model_services_are_those_that_a_controller_takes(helm):
    pytest.importorskip("kvist._core", reason="the checks of a controller need the compiled core")
    from kvist_controller.resources import (  # noqa: PLC0415
        ModelServiceSpec,
        check_identity,
        parse_model_service,
    )

    spec = {
        "model": "a/b",
        "engine": {"name": "sim", "arguments": {"blocks": 4096}},
        "replicas": 1,
        "aliases": ["c"],
        "role": "aggregate",
        "pools": [
            {"name": "p", "role": "prefill", "replicas": 2, "engineArgs": {"blocks": 512}},
            {"name": "d", "role": "decode"},
        ],
        "kvTransfer": {"connector": "sim", "protocol": "tcp", "lease": "20s", "prefillFromTokens": 64},
        "drainTimeout": "2s",
        "startupTimeout": "3m",
        "tokenizerDigest": "0" * 64,
        "hashUnitTokens": 64,
        "routing": {"preset": "foretoken", "picker": {"algorithm": "max"}},
        "admission": {
            "concurrency": {
                "maxConcurrentRequests": 8,
                "maxQueuedRequests": 9,
                "queueTimeout": "30s",
                "classes": [{"name": "people", "weight": 3}],
            }
        },
        "toolParser": "hermes",
        "reasoningParser": "none",
    }
    assert set(spec) == {field.alias for field in ModelServiceSpec.model_fields.values()}
    rendered = helm.render({"modelServices": [{"name": "sim", "spec": spec}]})
    (resource,) = json.loads(rendered.file("model-services", "model-services.json"))
    name = resource["metadata"]["name"]
    assert check_identity(api_version=resource["apiVersion"], kind=resource["kind"], name=name) == []
    assert parse_model_service(resource["spec"], name=name) == parse_model_service(spec, name="sim")


def test_the_schema_knows_each_field_of_a_model_service(chart):
    pytest.importorskip("kvist._core", reason="the checks of a controller need the compiled core")
    from kvist_controller.pools import KvTransferSpec, PoolSpec, RoleName  # noqa: PLC0415
    from kvist_controller.resources import EngineSpec, ModelServiceSpec, ReasoningParser, ToolParser  # noqa: PLC0415

    definition = json.loads((chart / "values.schema.json").read_text())["definitions"]["modelServiceSpec"]
    properties = definition["properties"]
    for known, model in (
        (properties, ModelServiceSpec),
        (properties["engine"]["properties"], EngineSpec),
        (properties["pools"]["items"]["properties"], PoolSpec),
        (properties["kvTransfer"]["properties"], KvTransferSpec),
    ):
        assert set(known) == {field.alias for field in model.model_fields.values()}
    for known, names in (
        (properties["toolParser"], ToolParser),
        (properties["reasoningParser"], ReasoningParser),
        (properties["pools"]["items"]["properties"]["role"], RoleName),
    ):
        assert known["enum"] == list(get_args(names))
