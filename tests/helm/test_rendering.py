"""What the chart renders is valid for Kubernetes, and only for what it says it needs."""

import json
from functools import cache

import kubernetes_validate
import pytest
import yaml

OLDEST, NEWEST = "1.30", "1.37"
KINDS_BY_COMPONENT = {
    "router": {"ConfigMap", "Deployment", "Service", "PodDisruptionBudget"},
    "controller": {"ConfigMap", "Deployment", "Service", "PersistentVolumeClaim"},
    "kvmaster": {"ConfigMap", "Deployment", "Service"},
    "agent": {"ConfigMap", "DaemonSet"},
    "worker": {"ConfigMap"},
    "nats": {"ConfigMap", "Deployment", "Service"},
}
SERVICE_SUFFIX = "-router-headless"
LONGEST_NAME = 63


def test_helm_finds_no_fault(helm, chart):
    done = helm.run("lint", "--strict", str(chart))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


@pytest.fixture(scope="module")
def validate():
    """Checks a manifest strictly; equal ones once."""
    seen = set()

    def check(item, version):
        key = (json.dumps(item, sort_keys=True), version)
        if key not in seen:
            kubernetes_validate.validate(item, version, strict=True)
            seen.add(key)

    with pytest.MonkeyPatch.context() as patch:
        # Each check reads megabytes of schemas anew otherwise.
        patch.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield check


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_manifest_is_valid(variant, validate, version):
    for item in variant.objects:
        validate(item, version)


def test_a_wrong_manifest_would_be_noticed(helm, validate):
    wrong = json.loads(json.dumps(helm.render({}).one("Deployment", "router")))
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(wrong, NEWEST)


def test_the_oldest_kubernetes_is_the_one_that_is_validated(chart):
    stated = yaml.safe_load((chart / "Chart.yaml").read_text())["kubeVersion"]
    assert stated == f">={OLDEST}.0-0"


def test_an_older_kubernetes_is_refused(helm, chart):
    done = helm.run("template", "mesh", str(chart), "--kube-version=1.29.9")
    assert done.returncode != 0
    assert "incompatible with Kubernetes" in done.stderr


def test_the_five_services_are_rendered(helm):
    rendered = helm.render({})
    for component, kinds in KINDS_BY_COMPONENT.items():
        found = {
            item["kind"]
            for item in rendered.objects
            if item["metadata"]["labels"]["app.kubernetes.io/component"] == component
        }
        assert found == kinds, component


def test_objects_are_told_apart(variant):
    names = [(item["kind"], item["metadata"]["name"]) for item in variant.objects]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("release", ["mesh", "kvist", "a" * 53, "team.a-" + "b" * 40])
def test_names_fit_whatever_the_release_is_called(helm, validate, release):
    rendered = helm.render({"networkPolicy": {"enabled": True}}, release=release)
    for item in rendered.objects:
        name = item["metadata"]["name"]
        assert len(name) <= LONGEST_NAME, name
        assert "." not in name
        validate(item, NEWEST)
    assert any(item["metadata"]["name"].endswith(SERVICE_SUFFIX) for item in rendered.of_kind("Service"))


def test_long_releases_that_differ_at_their_end_have_different_names(helm):
    names = [
        {item["metadata"]["name"] for item in helm.render({}, release="a" * 52 + end).objects} for end in ("x", "y")
    ]
    assert not names[0] & names[1]


def test_a_release_is_not_named_twice(helm):
    assert helm.render({}, release="kvist").one("Service", "router")["metadata"]["name"] == "kvist-router"


def test_a_name_that_no_service_may_have_is_refused(helm):
    done = helm.template({}, release="1mesh")
    assert "begin with a letter" in done.stderr
    assert helm.render({"fullnameOverride": "mesh"}, release="1mesh").one("Service", "router")


def test_everything_bears_the_standard_labels(variant):
    for item in variant.objects:
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "kvist"
        assert labels["app.kubernetes.io/instance"] == "mesh"
        assert labels["app.kubernetes.io/part-of"] == "kvist"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert labels["app.kubernetes.io/version"] == "0.1.0"
        assert labels["helm.sh/chart"] == "kvist-0.1.0"


def test_selectors_hold_nothing_that_changes(variant):
    for item in variant.workloads():
        component = item["metadata"]["labels"]["app.kubernetes.io/component"]
        selector = item["spec"]["selector"]["matchLabels"]
        assert selector == {
            "app.kubernetes.io/name": "kvist",
            "app.kubernetes.io/instance": "mesh",
            "app.kubernetes.io/component": component,
        }
        assert selector.items() <= item["spec"]["template"]["metadata"]["labels"].items()


def test_services_lead_to_ports_of_their_pods(variant):
    pods = [item["spec"]["template"] for item in variant.workloads()]
    for service in variant.of_kind("Service"):
        selector = service["spec"]["selector"].items()
        (pod,) = [pod for pod in pods if selector <= pod["metadata"]["labels"].items()]
        named = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= named


def test_policies_open_ports_of_their_pods(helm):
    rendered = helm.render({"networkPolicy": {"enabled": True}})
    pods = {item["metadata"]["name"]: item["spec"]["template"] for item in rendered.workloads()}
    policies = rendered.of_kind("NetworkPolicy")
    assert {policy["metadata"]["name"] for policy in policies} == set(pods)
    for policy in policies:
        ports = [port["name"] for port in pods[policy["metadata"]["name"]]["spec"]["containers"][0]["ports"]]
        for rule in policy["spec"]["ingress"]:
            assert {port["port"] for port in rule.get("ports", [])} <= set(ports)


def test_only_routers_are_open_to_strangers(helm):
    rendered = helm.render({"networkPolicy": {"enabled": True}})
    open_rules = {
        (policy["metadata"]["name"], port["port"])
        for policy in rendered.of_kind("NetworkPolicy")
        for rule in policy["spec"]["ingress"]
        if not rule.get("from")
        for port in rule["ports"]
    }
    assert open_rules == {("mesh-kvist-router", "http"), ("mesh-kvist-router", "grpc")}


def test_an_autoscaler_may_own_the_number_of_routers(helm):
    assert "replicas" not in helm.render({"router": {"replicas": None}}).one("Deployment", "router")["spec"]
    assert helm.render({"router": {"replicas": 0}}).one("Deployment", "router")["spec"]["replicas"] == 0


def test_the_controller_keeps_its_store_where_it_was_told(helm):
    def volume(persistence):
        rendered = helm.render({"controller": {"persistence": persistence}})
        volumes = rendered.one("Deployment", "controller")["spec"]["template"]["spec"]["volumes"]
        (state,) = [item for item in volumes if item["name"] == "state"]
        return state, len(rendered.of_kind("PersistentVolumeClaim"))

    own_claim = {"name": "state", "persistentVolumeClaim": {"claimName": "mesh-kvist-controller"}}
    assert volume({}) == (own_claim, 1)
    other_claim = {"name": "state", "persistentVolumeClaim": {"claimName": "mine"}}
    assert volume({"existingClaim": "mine"}) == (other_claim, 0)
    assert volume({"enabled": False}) == ({"name": "state", "emptyDir": {}}, 0)


def test_two_controllers_never_share_the_store(helm):
    spec = helm.render({}).one("Deployment", "controller")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_on_etcd_controllers_and_kv_masters_have_replicas_and_no_volume(helm):
    etcd = {"kind": "etcd", "etcd": {"endpoints": ["etcd:2379"]}}
    rendered = helm.render({"store": etcd, "controller": {"replicas": 3}, "kvmaster": {"replicas": 2}})
    for component, replicas in (("controller", 3), ("kvmaster", 2)):
        spec = rendered.one("Deployment", component)["spec"]
        # Another one goes on while one is replaced.
        assert (spec["replicas"], spec.get("strategy")) == (replicas, None)
    (container,) = rendered.one("Deployment", "controller")["spec"]["template"]["spec"]["containers"]
    assert "state" not in {mount["name"] for mount in container["volumeMounts"]}
    assert {"name": "KVIST__ADVERTISED_ADDRESS", "value": "$(POD_IP):7100"} in container["env"]
    assert not rendered.of_kind("PersistentVolumeClaim")


def test_the_notes_hold_lines_to_copy(helm, chart):
    def notes(*flags):
        done = helm.run("install", "mesh", str(chart), "--dry-run=client", "--namespace=serving", *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("NOTES:")[2]

    empty = notes()
    assert "port-forward service/mesh-kvist-router 8000:80 7000:7000" in empty
    assert "Nothing is served yet" in empty
    assert "no image is published yet" in empty
    served = notes('--set-json=modelServices=[{"name": "sim", "spec": {"engine": {"name": "sim"}}}]')
    assert '"model": "sim"' in served
    assert "Nothing is served yet" not in served
