"""The chart, rendered by helm: least privilege, the restricted profile, and no value that is silently ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.reference import chart as chart_reference
from millstream_operator.catalog.catalog_file import read_catalog_file
from millstream_operator.kube.kinds import OPTIONAL, WATCHED
from millstream_operator.rendering.network_policy import NetworkDefaults
from millstream_operator.settings import read_settings
from tests.support.helm_chart import (
    CHART,
    IMAGES,
    PREVIOUS,
    ROOT,
    Document,
    environment,
    have_helm,
    helm,
    of_kind,
    operator_of,
    pod_specs,
    render,
)


@pytest.fixture(scope="session", autouse=True)
def _helm() -> None:
    have_helm()


def test_lint_is_clean_even_when_strict() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout
    assert "ERROR" not in done.stdout


OWN_SECRET = [
    {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["millstream-probe-key"], "verbs": ["get", "patch"]}
]


def test_the_operator_reads_one_secret_its_own_which_helm_leaves_empty() -> None:
    documents = render()
    cluster_wide = [rule for role in of_kind(documents, "ClusterRole") for rule in role["rules"]]
    assert not any("secrets" in rule["resources"] for rule in cluster_wide)
    (role,) = (one for one in of_kind(documents, "Role") if one["rules"] == OWN_SECRET)
    assert role["metadata"]["namespace"] == "system"
    (secret,) = of_kind(documents, "Secret")
    assert secret["metadata"]["name"] == "millstream-probe-key"
    assert not {"data", "stringData"} & secret.keys(), "an upgrade must not take the operator's value away"
    (container,) = operator_of(documents)["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert environment["MILLSTREAM_PROBE_KEY_SECRET"] == "millstream-probe-key"


def test_rights_are_spelled_out_and_leave_secrets_alone() -> None:
    documents = render()
    rules = [rule for kind in ("ClusterRole", "Role") for role in of_kind(documents, kind) for rule in role["rules"]]
    assert rules
    for rule in rules:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]], rule
        assert "secrets" not in rule["resources"] or rule in OWN_SECRET, rule
        assert not any(resource.endswith(("/exec", "/attach")) for resource in rule["resources"]), rule
    writable = {
        r for rule in rules if {"create", "patch", "update", "delete"} & {*rule["verbs"]} for r in rule["resources"]
    }
    assert "llmdeployments" not in writable, "the spec is the user's; the operator writes the status alone"


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
            for part in ("requests", "limits"):  # a namespace's ResourceQuota refuses a pod that lacks one of them
                assert {*container["resources"][part]} == {"cpu", "memory", "ephemeral-storage"}


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
    (config,) = (found for found in of_kind(changed, "ConfigMap") if "pod-defaults.json" in found["data"])
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


def test_the_inventory_is_looked_at_and_nothing_more() -> None:
    documents = render()
    (role,) = (found for found in of_kind(documents, "ClusterRole") if found["metadata"]["name"].endswith("-inventory"))
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "watch"]}]
    bound = {binding["roleRef"]["name"] for binding in of_kind(documents, "ClusterRoleBinding")}
    assert role["metadata"]["name"] in bound
    for values in (["inventory.mode=Disabled"], ['operator.watchNamespaces=["a"]']):
        without = render(*values)
        assert "-inventory" not in yaml.safe_dump_all(without)
        assert environment(without)["MILLSTREAM_INVENTORY"] == "Disabled"
    insisted = render('operator.watchNamespaces=["a"]', "inventory.mode=Enabled")
    (binding,) = of_kind(insisted, "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


def test_own_gpus_reach_the_operator_as_a_file_that_it_can_read(tmp_path: Path) -> None:
    """Helm turns numbers into floats on their way: what arrives must still be a catalogue."""
    part = {
        "computeCapability": "9.0",
        "usableMemoryBytes": 137438953472,
        "memoryBandwidthBytesPerSecond": 4000000000000,
        "denseFlopsPerSecond": {"fp16": 400000000000000},
        "pcieBytesPerSecond": 63000000000,
        "listPriceUSDPerHour": 3.25,
        "source": "our own measurement",
    }
    values = tmp_path / "values.yaml"
    gpus = {"L4-24GB": {"listPriceUSDPerHour": 0.5}, "X1-128GB": part}
    values.write_text(yaml.safe_dump({"catalog": {"gpus": gpus}}))
    sets = [word for image in IMAGES for word in ("--set", image)]
    done = helm("template", "m", str(CHART), "--kube-version", "1.34.0", *sets, "-f", str(values))
    documents = [document for document in yaml.safe_load_all(done.stdout) if document]
    (config,) = (found for found in of_kind(documents, "ConfigMap") if "catalog.yaml" in found["data"])
    file = tmp_path / "catalog.yaml"
    file.write_text(config["data"]["catalog.yaml"])
    catalog = read_catalog_file(file)
    known, own = catalog.get("L4-24GB"), catalog.get("X1-128GB")
    assert known is not None
    assert own is not None
    assert known.hourly_milli_usd == 500
    assert own.usable_memory_bytes == part["usableMemoryBytes"]
    pod = operator_of(documents)["spec"]["template"]["spec"]
    (volume,) = (
        found for found in pod["volumes"] if found.get("configMap", {}).get("name") == config["metadata"]["name"]
    )
    (mount,) = (found for found in pod["containers"][0]["volumeMounts"] if found["name"] == volume["name"])
    assert environment(documents)["MILLSTREAM_GPU_CATALOG"] == f"{mount['mountPath']}/catalog.yaml"
    assert "subPath" not in mount, "it would not follow the ConfigMap"


def test_a_catalogue_may_be_a_configmap_of_ones_own() -> None:
    documents = render("catalog.configMap=prices")
    assert not [found for found in of_kind(documents, "ConfigMap") if "catalog.yaml" in found["data"]]
    volumes = operator_of(documents)["spec"]["template"]["spec"]["volumes"]
    assert {"name": "gpu-catalog", "configMap": {"name": "prices"}} in volumes


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


def test_what_was_measured_is_one_config_map_of_the_operators_own_namespace() -> None:
    documents = render(release="one")
    name = operator_of(documents)["metadata"]["name"]
    (role,) = [one for one in of_kind(documents, "Role") if one["metadata"]["name"] == f"{name}-calibration"]
    assert role["metadata"]["namespace"] == "system"
    rights = {tuple(rule.get("resourceNames", ())): set(rule["verbs"]) for rule in role["rules"]}
    assert rights == {(f"{name}-calibration",): {"get", "patch"}, (): {"create"}}
    assert {resource for rule in role["rules"] for resource in rule["resources"]} == {"configmaps"}
    (binding,) = [b for b in of_kind(documents, "RoleBinding") if b["metadata"]["name"] == f"{name}-calibration"]
    assert [(s["name"], s["namespace"]) for s in binding["subjects"]] == [(name, "system")]


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
        ("monitoring.prometheusURL=prometheus", "prometheusURL"),
        ("monitoring.prometheusURL=http://me:secret@prometheus", "prometheusURL"),
        ('podDefaults.tolerations=[{"keyy":"gpu"}]', "keyy"),
        ("operator.resources.limits.memory=much", "memory"),
        ('operator.watchNamespaces=["UPPER"]', "watchNamespaces"),
        ("inventory.mode=Maybe", "mode"),
        ('inventory.nodePools=[{"product":"L4","gpusPerNode":0,"maxNodes":1}]', "gpusPerNode"),
        ('inventory.nodePools=[{"product":"L4","gpus":8,"gpusPerNode":8,"maxNodes":1}]', "gpus"),
        ("catalog.gpus.L4=cheap", "L4"),
    ],
)
def test_a_value_that_would_do_nothing_is_refused_by_name(value: str, complaint: str) -> None:
    flag = "--set-json" if "=[" in value else "--set"
    sets = [word for image in IMAGES for word in ("--set", image)]
    done = helm("template", "m", str(CHART), "--kube-version", "1.34.0", *sets, flag, value)
    assert done.returncode != 0
    assert complaint in done.stderr


@pytest.mark.parametrize("image", IMAGES)
def test_a_missing_image_name_is_an_error(image: str) -> None:
    done = helm("template", "m", str(CHART), "--kube-version", "1.34.0", "--set", image)
    assert done.returncode != 0
    assert "image is required: the reference that `make images` prints" in done.stderr


def test_the_settings_of_companions_reach_the_operator() -> None:
    documents = render("monitoring.prometheusURL=http://prometheus:9090", "monitoring.labels.release=prometheus")
    (container,) = operator_of(documents)["spec"]["template"]["spec"]["containers"]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    settings = read_settings(
        {name: value for name, value in env.items() if value and name != "MILLSTREAM_POD_DEFAULTS"}
    )
    companions = settings.defaults.companions
    assert companions.prometheus_url == "http://prometheus:9090"
    assert companions.monitoring_labels == {"release": "prometheus"}
    bare = {
        v["name"]: v.get("value") for v in operator_of(render())["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert (bare["MILLSTREAM_PROMETHEUS_URL"], bare["MILLSTREAM_MONITORING_LABELS"]) == ("", "{}")


def test_every_kind_that_is_read_or_written_is_granted_and_no_more() -> None:
    """A missing right shows only in the first cluster that has the kind."""
    (role,) = of_kind(render("inventory.mode=Disabled"), "ClusterRole")  # nodes are a role of their own
    granted = {
        (group, resource): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    written = {"get", "list", "create", "patch", "delete"}
    for kind in (*WATCHED, *OPTIONAL):
        wanted = {"get", "list"} | ({"watch"} if kind in WATCHED else set()) | (written if kind.owned else set())
        assert granted[kind.group, kind.plural] == wanted, kind.kind


def test_an_upgrade_changes_nothing_that_cannot_be_changed() -> None:
    """A selector that differs, and helm upgrade ends half-way, with the old operator gone."""
    before, after = render(chart=PREVIOUS), render()
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    assert PREVIOUS.name != f"millstream-{version}.tgz", "a change of the templates is another version of the chart"
    assert operator_of(before)["spec"]["selector"] == operator_of(after)["spec"]["selector"]
    named = [{(d["kind"], d["metadata"]["name"]) for d in documents} for documents in (before, after)]
    assert named[0] <= named[1], "what goes by its name is deleted by an upgrade"
    roles = [{str(binding["roleRef"]) for binding in of_kind(d, "ClusterRoleBinding")} for d in (before, after)]
    assert roles[0] <= roles[1], "a binding's role cannot be changed"


def test_a_newer_crd_takes_every_object_of_the_older_one() -> None:
    """Fields are only added, and no enum loses a value: objects outlive the chart that they were written under."""
    before, after = (fields_of(render("crds.keep=false", chart=chart)) for chart in (PREVIOUS, CHART))
    assert before
    for path, node in before.items():
        assert path in after, f"{path} is gone"
        assert node.get("type") == after[path].get("type"), path
        assert set(node.get("enum", [])) <= set(after[path].get("enum", [])), path
        assert set(after[path].get("required", [])) <= set(node.get("required", [])), path


def fields_of(documents: list[Document]) -> dict[str, Document]:
    """Every node of the CRD's schema, by its path."""
    (crd,) = of_kind(documents, "CustomResourceDefinition")
    found: dict[str, Document] = {}
    waiting = [("", crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])]
    while waiting:
        path, node = waiting.pop()
        found[path] = node
        waiting += [(f"{path}.{name}", child) for name, child in node.get("properties", {}).items()]
        waiting += [(f"{path}[]", node["items"])] if "items" in node else []
    return found


def test_the_page_of_values_is_what_the_chart_says() -> None:
    assert chart_reference.PAGE.read_text(encoding="utf-8") == chart_reference.page(), "run `make crds`"


def test_every_value_is_explained_where_it_stands() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    documented = {value.path: value.text for _, _, values in chart_reference.sections(text) for value in values}
    wanted = {f"{section}.{name}" for section, values in yaml.safe_load(text).items() for name in values}
    assert documented.keys() == wanted
    assert all(documented.values()), [path for path, words in documented.items() if not words]
    assert all(intro for _, intro, _ in chart_reference.sections(text))


def test_every_value_has_a_schema_and_every_schema_a_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
    for name, section in values.items():
        assert schema["properties"][name]["additionalProperties"] is False
        assert set(section) == set(schema["properties"][name]["properties"]), name


def test_declared_node_pools_reach_the_operator() -> None:
    pools = '[{"product":"H100-80GB","gpusPerNode":8,"maxNodes":4,"labels":{"pool":"gpu"}}]'
    (container,) = operator_of(render(f"inventory.nodePools={pools}"))["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    del environment["MILLSTREAM_POD_DEFAULTS"]  # a file of the pod
    (pool,) = read_settings(environment).node_pools
    assert (pool.product, pool.gpus_per_node, pool.max_nodes, pool.labels) == ("H100-80GB", 8, 4, {"pool": "gpu"})


def test_the_models_network_reaches_the_operator() -> None:
    def network(*values: str) -> Any:
        (container,) = operator_of(render(*values))["spec"]["template"]["spec"]["containers"]
        (found,) = (one["value"] for one in container["env"] if one["name"] == "MILLSTREAM_NETWORK")
        return read_settings({"MILLSTREAM_RUNTIME_IMAGE": "r:1", "MILLSTREAM_NETWORK": found}).defaults.network

    assert network() == NetworkDefaults()
    peers = 'network.ingress=[{"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":"web"}}}]'
    changed = network("network.mode=Disabled", peers, "network.dnsPorts=[5353]")
    assert changed.mode == "Disabled"
    assert changed.ingress[0].namespace_selector.match_labels == {"kubernetes.io/metadata.name": "web"}
    assert changed.dns_ports == [5353]
