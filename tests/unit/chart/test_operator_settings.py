"""Values of the chart reach the operator: its environment and its files are read back by the operator's own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from millstream_operator.catalog.catalog_file import read_catalog_file
from millstream_operator.rendering.network_policy import NetworkDefaults
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.settings import read_settings
from tests.support.helm_chart import (
    CHART,
    IMAGES,
    environment,
    helm,
    of_kind,
    operator_of,
    render,
)


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


def test_the_time_until_the_next_look_reaches_the_operator_and_is_absent_by_default() -> None:
    """Absent, so that an upgrade that brings this value changes no Deployment."""
    assert environment(render("operator.recheckSeconds=2"))["MILLSTREAM_RECHECK_SECONDS"] == "2"
    for values in ([], ["operator.recheckSeconds=30"], ["operator.recheckSeconds=null"]):
        assert "MILLSTREAM_RECHECK_SECONDS" not in environment(render(*values))


def test_default_pull_secrets_reach_the_operator_and_are_absent_where_there_are_none() -> None:
    """An operator of an earlier release, which the chart may be upgraded around, does not know them."""

    def rendered(*values: str) -> str:
        (found,) = (one for one in of_kind(render(*values), "ConfigMap") if "pod-defaults.json" in one["data"])
        return str(found["data"]["pod-defaults.json"])

    assert "imagePullSecrets" not in rendered()
    defaults = PodDefaults.model_validate_json(rendered('podDefaults.imagePullSecrets=["registry"]'))
    assert defaults.image_pull_secrets == ["registry"]
