"""Pods: safe, probed, bounded, and restarted when their settings change."""

import math
import re

import pytest

SECONDS_AFTER_DRAIN = 5
BYTES_BY_UNIT = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
RESTRICTED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip


def containers(pod):
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def read_bytes(quantity):
    number, unit = re.fullmatch(r"(\d+)(\w*)", quantity).groups()
    return int(number) * BYTES_BY_UNIT[unit]


def test_pods_pass_the_restricted_profile(variant):
    for name, pod in variant.pods():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for volume in spec["volumes"]:
            assert volume.keys() - {"name"} <= RESTRICTED_VOLUMES, name
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert not any("hostPort" in port for port in container.get("ports", []))


def test_pods_hold_no_token_of_the_kubernetes_api(variant):
    for name, pod in variant.pods():
        assert pod["spec"]["automountServiceAccountToken"] is False, name
    for account in variant.of_kind("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_pods_get_no_variables_of_services(variant):
    # A Service `kvist--x` would give KVIST__X_PORT, which a process refuses as an unknown setting.
    for name, pod in variant.pods():
        assert pod["spec"]["enableServiceLinks"] is False, name


def test_the_service_account_exists_or_was_named(helm):
    def account(values):
        rendered = helm.render({"serviceAccount": values})
        names = {pod["spec"]["serviceAccountName"] for _, pod in rendered.pods()}
        return names, [item["metadata"]["name"] for item in rendered.of_kind("ServiceAccount")]

    assert account({}) == ({"mesh-kvist"}, ["mesh-kvist"])
    assert account({"name": "mine"}) == ({"mine"}, ["mine"])
    assert account({"create": False, "name": "mine"}) == ({"mine"}, [])
    assert account({"create": False}) == ({"default"}, [])


def test_containers_state_what_they_need(variant):
    for name, pod in variant.pods():
        for container in containers(pod):
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), name
            assert "memory" in container["resources"]["limits"], name


def test_whatever_runs_for_good_is_probed(variant):
    for item in variant.workloads():
        for container in item["spec"]["template"]["spec"]["containers"]:
            ports = {port["name"] for port in container["ports"]}
            paths = {
                kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")
            }
            assert {container[f"{kind}Probe"]["httpGet"]["port"] for kind in paths} <= ports
            if container["name"] == "nats":
                assert set(paths.values()) == {"/healthz"}
            else:
                assert paths == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}


def test_no_image_floats(variant):
    for name, pod in variant.pods():
        for container in containers(pod):
            image = container["image"]
            assert re.search(r"(:[\w][\w.-]*|@sha256:[0-9a-f]{64})$", image), (name, image)
            assert not image.endswith(":latest")


def test_a_digest_wins_over_a_tag(helm):
    digest = "sha256:" + "a" * 64
    rendered = helm.render({"image": {"repository": "r.example.com/kvist", "tag": "1.2", "digest": digest}})
    images = {name: pod["spec"]["containers"][0]["image"] for name, pod in rendered.pods()}
    assert images.pop("mesh-kvist-nats") == "docker.io/library/nats:2.14.0"
    assert set(images.values()) == {f"r.example.com/kvist@{digest}"}


def test_names_within_a_pod_are_distinct(variant):
    # A server-side apply refuses duplicates.
    for name, pod in variant.pods():
        volumes = [volume["name"] for volume in pod["spec"]["volumes"]]
        assert len(set(volumes)) == len(volumes), name
        for container in containers(pod):
            for key, of in (("env", "name"), ("ports", "name"), ("ports", "containerPort")):
                values = [item[of] for item in container.get(key, [])]
                assert len(set(values)) == len(values), (name, key)
            mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(set(mounts)) == len(mounts)
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)


@pytest.mark.parametrize("drain_seconds", [0, 12.5, 300])
def test_a_router_may_drain_to_its_end(helm, drain_seconds):
    spec = helm.render({"router": {"settings": {"drain_seconds": drain_seconds}}}).one("Deployment", "router")["spec"]
    pod = spec["template"]["spec"]
    pause_seconds = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    least = pause_seconds + math.ceil(drain_seconds) + SECONDS_AFTER_DRAIN
    assert pod["terminationGracePeriodSeconds"] >= least


def test_upgrades_keep_all_routers(helm):
    strategy = helm.render({}).one("Deployment", "router")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


@pytest.mark.parametrize("drain_timeout", ["91s", "1.6m", "95000ms", "0.1h", 91])
def test_workers_that_could_not_drain_are_refused(helm, drain_timeout):
    service = {"name": "slow", "spec": {"engine": {"name": "sim"}, "drainTimeout": drain_timeout}}
    assert "terminationGracePeriodSeconds" in helm.refusal({"modelServices": [service]})
    helm.render({"modelServices": [service], "agent": {"terminationGracePeriodSeconds": 400}})


@pytest.mark.parametrize("process", ["router", "kvmaster"])
def test_the_index_fits_into_the_memory_limit(helm, process):
    rendered = helm.render({})
    container = rendered.one("Deployment", process)["spec"]["template"]["spec"]["containers"][0]
    budget = int(re.search(r"index_byte_budget: (\d+)", rendered.file(process, f"{process}.yaml"))[1])
    assert read_bytes(container["resources"]["requests"]["memory"]) > budget
    assert read_bytes(container["resources"]["limits"]["memory"]) > 1.5 * budget


CHANGES = {
    "router": {"router": {"settings": {"text_threads": 3}}},
    "controller": {"controller": {"settings": {"registry": {"lease_seconds": 11}}}},
    "kvmaster": {"kvmaster": {"settings": {"worker_threads": 3}}},
    "agent": {"worker": {"settings": {"digest_interval_ms": 1_000}}},
    "nats": {"listenHost": "[::]"},
}


@pytest.mark.parametrize("component", CHANGES)
def test_a_changed_setting_restarts_its_process(helm, component):
    def checksums(values):
        return {
            item["metadata"]["labels"]["app.kubernetes.io/component"]: item["spec"]["template"]["metadata"][
                "annotations"
            ]["checksum/config"]
            for item in helm.render(values).workloads()
        }

    before, after = checksums({}), checksums(CHANGES[component])
    changed = {name for name in before if before[name] != after[name]}
    assert changed == (set(before) if component == "nats" else {component})


def test_ways_out_reach_their_pods(helm):
    for component in ("router", "controller", "kvmaster", "agent", "nats"):
        pod = {
            "annotations": {"example.com/note": "yes"},
            "labels": {"example.com/team": "serving"},
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "priorityClassName": "high",
            "extraEnv": [{"name": "A", "value": "b"}],
            "extraVolumes": [{"name": "models", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
        }
        rendered = helm.render({component: {"pod": pod}})
        kind = "DaemonSet" if component == "agent" else "Deployment"
        template = rendered.one(kind, component)["spec"]["template"]
        spec, container = template["spec"], template["spec"]["containers"][0]
        assert template["metadata"]["annotations"]["example.com/note"] == "yes"
        assert template["metadata"]["labels"]["example.com/team"] == "serving"
        for key in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
            assert spec[key] == pod[key]
        assert pod["extraEnv"][0] in container["env"]
        assert pod["extraVolumes"][0] in spec["volumes"]
        assert pod["extraVolumeMounts"][0] in container["volumeMounts"]
