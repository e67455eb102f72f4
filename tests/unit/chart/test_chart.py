"""The chart, rendered by helm: least privilege, the restricted profile, and no value that is silently ignored."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from millstream_operator.reconciling.kinds import WATCHED

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "millstream"
HELM = ROOT / ".tools" / "bin" / "helm"
IMAGES = ("operator.image=registry/operator:1", "runtime.image=registry/runtime:1")

Document = dict[str, Any]


@pytest.fixture(scope="session", autouse=True)
def _helm() -> None:
    """helm from the pinned sources; built once, then found in a cache."""
    if not HELM.exists():
        subprocess.run([sys.executable, "-m", "cluster", "tools", "helm"], cwd=ROOT, check=True)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)


def render(*values: str, release: str = "millstream") -> list[Document]:
    sets = [word for value in (*IMAGES, *values) for word in ("--set-json" if "=[" in value else "--set", value)]
    done = helm("template", release, str(CHART), "--namespace", "system", "--kube-version", "1.34.0", *sets)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def operator_of(documents: list[Document]) -> Document:
    (deployment,) = of_kind(documents, "Deployment")
    return deployment


def pod_specs(documents: list[Document]) -> Iterator[Document]:
    for document in documents:
        if document["kind"] == "Deployment":
            yield document["spec"]["template"]["spec"]
        if document["kind"] == "Pod":
            yield document["spec"]


def test_lint_is_clean_even_when_strict() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout
    assert "ERROR" not in done.stdout


def test_rights_are_spelled_out_and_leave_secrets_alone() -> None:
    documents = render()
    rules = [rule for kind in ("ClusterRole", "Role") for role in of_kind(documents, kind) for rule in role["rules"]]
    assert rules
    for rule in rules:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]], rule
        assert "secrets" not in rule["resources"], rule
        assert not any(resource.endswith(("/exec", "/attach")) for resource in rule["resources"]), rule
    writable = {
        r for rule in rules if {"create", "patch", "update", "delete"} & {*rule["verbs"]} for r in rule["resources"]
    }
    assert "llmdeployments" not in writable, "the spec is the user's; the operator writes the status alone"


def test_every_kind_that_is_watched_may_be_read_and_every_child_written() -> None:
    (role,) = of_kind(render(), "ClusterRole")
    granted = {
        (group, resource): {*rule["verbs"]}
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    for kind in WATCHED:
        verbs = granted[kind.group, kind.plural]
        assert {"get", "list", "watch"} <= verbs, kind
        assert ({"create", "patch", "delete"} <= verbs) == kind.owned, kind


def test_every_pod_meets_the_restricted_profile() -> None:
    specs = list(pod_specs(render()))
    assert len(specs) == 2  # the operator, and the pod of `helm test`
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert {"requests", "limits"} <= set(container["resources"])


def test_the_crd_is_the_generated_one_word_for_word() -> None:
    generated = yaml.safe_load((ROOT / "crds" / "millstream.dev_llmdeployments.yaml").read_text())
    (plain,) = of_kind(render("crds.keep=false"), "CustomResourceDefinition")
    assert plain == generated
    (kept,) = of_kind(render(), "CustomResourceDefinition")
    assert kept["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert kept == generated
    assert not of_kind(render("crds.enabled=false"), "CustomResourceDefinition")


def test_pod_defaults_reach_the_operator_and_restart_it() -> None:
    plain, changed = render(), render("podDefaults.labels.team=search", 'podDefaults.tolerations=[{"key":"gpu"}]')
    (config,) = of_kind(changed, "ConfigMap")
    assert json.loads(config["data"]["pod-defaults.json"]) == {
        "labels": {"team": "search"},
        "annotations": {},
        "nodeSelector": {},
        "tolerations": [{"key": "gpu"}],
        "priorityClassName": "",
    }
    templates = [operator_of(documents)["spec"]["template"] for documents in (plain, changed)]
    assert templates[0]["metadata"] != templates[1]["metadata"]
    container = templates[0]["spec"]["containers"][0]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    mount = container["volumeMounts"][0]["mountPath"]
    assert env["MILLSTREAM_POD_DEFAULTS"] == f"{mount}/pod-defaults.json"
    assert env["MILLSTREAM_RUNTIME_IMAGE"] == "registry/runtime:1"


def test_named_namespaces_are_all_that_the_operator_gets() -> None:
    documents = render('operator.watchNamespaces=["a","b"]')
    assert not of_kind(documents, "ClusterRoleBinding")
    bindings = [b for b in of_kind(documents, "RoleBinding") if b["roleRef"]["kind"] == "ClusterRole"]
    assert [binding["metadata"]["namespace"] for binding in bindings] == ["a", "b"]
    assert {subject["namespace"] for binding in bindings for subject in binding["subjects"]} == {"system"}
    env = operator_of(documents)["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "MILLSTREAM_WATCH_NAMESPACES", "value": "a,b"} in env


def test_two_replicas_are_kept_apart_and_never_all_taken_away() -> None:
    documents = render()
    deployment, labels = operator_of(documents), operator_of(documents)["spec"]["selector"]["matchLabels"]
    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["strategy"]["type"] == "RollingUpdate", "the Lease lets old and new run side by side"
    (spread,) = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert spread["labelSelector"]["matchLabels"] == labels
    (budget,) = of_kind(documents, "PodDisruptionBudget")
    assert (budget["spec"]["maxUnavailable"], budget["spec"]["selector"]["matchLabels"]) == (1, labels)
    assert not of_kind(render("operator.replicas=1"), "PodDisruptionBudget"), "it could only hold a drain up"


def test_leadership_has_rights_on_one_lease_of_its_own_namespace() -> None:
    documents = render(release="one")
    name = operator_of(documents)["metadata"]["name"]
    roles = {role["metadata"]["name"]: role for role in of_kind(documents, "Role")}
    role = roles[f"{name}-leader-election"]
    assert role["metadata"]["namespace"] == "system"
    verbs = {tuple(rule.get("resourceNames", ())): set(rule["verbs"]) for rule in role["rules"]}
    assert verbs == {(name,): {"get", "update"}, (): {"create"}}, "a name cannot be given to create"
    env = {
        variable["name"]: variable.get("value")
        for variable in operator_of(documents)["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert (env["MILLSTREAM_LEADER_ELECTION"], env["MILLSTREAM_LEASE_NAME"]) == ("Enabled", name)
    (binding,) = [b for b in of_kind(documents, "RoleBinding") if b["metadata"]["name"] == f"{name}-leader-election"]
    assert binding["roleRef"]["kind"] == "Role"
    assert [(s["name"], s["namespace"]) for s in binding["subjects"]] == [(name, "system")]


def test_probes_and_metrics_reach_the_port_that_the_policy_leaves_open() -> None:
    documents = render("networkPolicy.enabled=true")
    (container,) = operator_of(documents)["spec"]["template"]["spec"]["containers"]
    paths = {probe: container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "readiness", "liveness")}
    assert {probe: get["path"] for probe, get in paths.items()} == {
        "startup": "/healthz",
        "readiness": "/readyz",
        "liveness": "/healthz",
    }
    (service,) = of_kind(documents, "Service")
    (port,) = service["spec"]["ports"]
    (policy,) = of_kind(documents, "NetworkPolicy")
    (allowed,) = policy["spec"]["ingress"][0]["ports"]
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {allowed["port"], port["targetPort"], *(get["port"] for get in paths.values())} == {"health"}
    assert named["health"] == port["port"]
    assert service["spec"]["selector"] == operator_of(documents)["spec"]["selector"]["matchLabels"]


def test_a_service_monitor_comes_when_it_is_asked_for_and_selects_the_metrics_service() -> None:
    assert not of_kind(render(), "ServiceMonitor")
    documents = render("serviceMonitor.enabled=true", "serviceMonitor.labels.release=prometheus")
    (monitor,) = of_kind(documents, "ServiceMonitor")
    (service,) = of_kind(documents, "Service")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"] == [{"port": service["spec"]["ports"][0]["name"], "interval": "30s"}]


def test_two_releases_share_no_name() -> None:
    def names(release: str) -> set[str]:
        documents = render("crds.enabled=false", release=release)
        return {document["metadata"]["name"] for document in documents}

    assert not names("one") & names("two")


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("operator.imagee=x", "imagee"),
        ("surprise=1", "surprise"),
        ("operator.logLevel=Loud", "logLevel"),
        ("crds.keep=maybe", "crds/keep"),
        ("operator.replicas=-1", "replicas"),
        ("operator.replicas=two", "replicas"),
        ("serviceMonitor.interval=often", "interval"),
        ('podDefaults.tolerations=[{"keyy":"gpu"}]', "keyy"),
        ("operator.resources.limits.memory=much", "memory"),
        ('operator.watchNamespaces=["UPPER"]', "watchNamespaces"),
    ],
)
def test_a_value_that_would_do_nothing_is_refused_by_name(value: str, complaint: str) -> None:
    flag = "--set-json" if "=[" in value else "--set"
    sets = [word for image in IMAGES for word in ("--set", image)]
    done = helm("template", "m", str(CHART), "--kube-version", "1.34.0", *sets, flag, value)
    assert done.returncode != 0
    assert complaint in done.stderr


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_that_nobody_named_is_asked_for(image: str) -> None:
    done = helm("template", "m", str(CHART), "--kube-version", "1.34.0", "--set", image)
    assert done.returncode != 0
    assert "image is required: the reference that `make images` prints" in done.stderr


def test_every_value_has_a_schema_and_every_schema_a_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
    for name, section in values.items():
        assert schema["properties"][name]["additionalProperties"] is False
        assert set(section) == set(schema["properties"][name]["properties"]), name
