"""The operator's environment: what is wrong with it is one sentence, before anything is started."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from millstream_operator import __main__
from millstream_operator.settings import SettingsError, read_settings

IMAGE = {"MILLSTREAM_RUNTIME_IMAGE": "registry.example.com/runtime:1"}


def test_an_image_is_enough() -> None:
    settings = read_settings(IMAGE)
    assert settings.defaults.plan.runtime_image == IMAGE["MILLSTREAM_RUNTIME_IMAGE"]
    assert settings.watch_namespaces == (), "all of them"
    assert (settings.log_level, settings.health_port) == (logging.INFO, 8080)
    assert not settings.service_access_by_proxy


def test_everything_is_read(tmp_path: Path) -> None:
    defaults = tmp_path / "pods.json"
    defaults.write_text(json.dumps({"labels": {"team": "a"}, "nodeSelector": {"disk": "ssd"}, "tolerations": []}))
    settings = read_settings(
        IMAGE
        | {
            "MILLSTREAM_POD_DEFAULTS": str(defaults),
            "MILLSTREAM_WATCH_NAMESPACES": " a, b-2 ,",
            "MILLSTREAM_LOG_LEVEL": "DEBUG",
            "MILLSTREAM_HEALTH_PORT": "9000",
            "MILLSTREAM_SERVICE_ACCESS": "Proxy",
            "MILLSTREAM_GPU_CATALOG": "/etc/gpus/catalog.yaml",
            "MILLSTREAM_INVENTORY": "Disabled",
            "MILLSTREAM_NODE_POOLS": '[{"product": "H100-80GB", "gpusPerNode": 8, "maxNodes": 4}]',
            "MILLSTREAM_DISCOVERY_SECONDS": "10",
            "MILLSTREAM_RECHECK_SECONDS": "2",
            "MILLSTREAM_NETWORK": '{"mode": "Disabled", "ingress": [{"namespaceSelector": {}}], "dnsPorts": [5353]}',
            "MILLSTREAM_PROBE_KEY_SECRET": "llm-probe-key",
            "MILLSTREAM_MAX_ADOPTIONS": "5",
            "MILLSTREAM_PROMETHEUS_URL": "https://prometheus.monitoring.svc:9090/prefix",
            "MILLSTREAM_MONITORING_LABELS": '{"release": "prometheus"}',
        }
    )
    assert (settings.discovery_seconds, settings.recheck_seconds) == (10, 2)
    network = settings.defaults.network
    assert (network.mode, len(network.ingress), network.dns_ports) == ("Disabled", 1, [5353])
    assert settings.probe_key_secret == "llm-probe-key"
    assert settings.max_adoptions == 5
    companions = settings.defaults.companions
    assert companions.prometheus_url == "https://prometheus.monitoring.svc:9090/prefix"
    assert companions.monitoring_labels == {"release": "prometheus"}
    assert settings.gpu_catalog == Path("/etc/gpus/catalog.yaml")
    assert not settings.inventory
    (pool,) = settings.node_pools
    assert (pool.product, pool.gpus_per_node, pool.max_nodes) == ("H100-80GB", 8, 4)
    assert settings.watch_namespaces == ("a", "b-2")
    assert settings.defaults.pods.node_selector == {"disk": "ssd"}
    assert (settings.log_level, settings.health_port) == (logging.DEBUG, 9000)
    assert settings.service_access_by_proxy


def test_a_variable_that_is_there_but_empty_is_the_default() -> None:
    names: tuple[str, ...] = ("POD_DEFAULTS", "WATCH_NAMESPACES", "LOG_LEVEL", "HEALTH_PORT", "SERVICE_ACCESS")
    names += ("PROMETHEUS_URL", "MONITORING_LABELS", "GPU_CATALOG", "INVENTORY", "NODE_POOLS", "DISCOVERY_SECONDS")
    names += ("RECHECK_SECONDS",)
    assert read_settings(IMAGE | {f"MILLSTREAM_{name}": "" for name in names}) == read_settings(IMAGE)


BAD: dict[str, tuple[str, str, list[str]]] = {
    "no image": ("RUNTIME_IMAGE", "  ", ["empty", "image"]),
    "namespace": ("WATCH_NAMESPACES", "a,Team_B", ["'Team_B'", "namespace"]),
    "level": ("LOG_LEVEL", "LOUD", ["'LOUD'", "DEBUG, INFO, WARNING, ERROR"]),
    "level in small letters": ("LOG_LEVEL", "info", ["'info'", "INFO"]),
    "port word": ("HEALTH_PORT", "http", ["'http'", "1 to 65535"]),
    "port zero": ("HEALTH_PORT", "0", ["'0'"]),
    "port beyond": ("HEALTH_PORT", "65536", ["'65536'"]),
    "port negative": ("HEALTH_PORT", "-1", ["'-1'"]),
    "port of 5000 digits": ("HEALTH_PORT", "1" * 5000, ["1 to 65535"]),
    "access": ("SERVICE_ACCESS", "Tunnel", ["'Tunnel'", "Direct, Proxy"]),
    "seconds too few": ("DISCOVERY_SECONDS", "4", ["'4'", "5 to 3600"]),
    "too soon": ("RECHECK_SECONDS", "1", ["'1'", "2 to 3600"]),
    "seconds that are none": ("DISCOVERY_SECONDS", "1m", ["'1m'", "whole seconds"]),
    "inventory": ("INVENTORY", "Maybe", ["'Maybe'", "Enabled, Disabled"]),
    "no list of pools": ("NODE_POOLS", "{}", ["JSON list of node pools"]),
    "a pool without nodes": (
        "NODE_POOLS",
        '[{"product": "L4", "gpusPerNode": 8, "maxNodes": 0}]',
        ["0.maxNodes", "greater than or equal to 1"],
    ),
    "a pool of words": ("NODE_POOLS", '[{"product": "L4", "gpus": 8, "maxNodes": 1}]', ["0.gpus"]),
    "no URL": ("PROMETHEUS_URL", "prometheus:9090", ["'prometheus:9090'", "http://"]),
    "a query": ("PROMETHEUS_URL", "http://p:9090/?x=1", ["without a query"]),
    "no object": ("MONITORING_LABELS", "[]", ["JSON object"]),
    "no JSON": ("MONITORING_LABELS", "release=a", ["JSON object"]),
    "no label": ("MONITORING_LABELS", '{"release": "a b"}', ["release", "JSON object"]),
    "no such file": ("POD_DEFAULTS", "/nowhere/pods.json", ["/nowhere/pods.json", "No such file"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_reported_with_its_variable(name: str) -> None:
    variable, value, words = BAD[name]
    with pytest.raises(SettingsError) as caught:
        read_settings(IMAGE | {f"MILLSTREAM_{variable}": value})
    said = str(caught.value)
    assert said.startswith(f"MILLSTREAM_{variable}")
    assert "\n" not in said
    assert said.endswith(".")
    for word in words:
        assert word in said


BAD_FILES: dict[str, tuple[bytes, list[str]]] = {
    "not JSON": (b"labels: {}", ["Invalid JSON"]),
    "not text": (b"\xff\xfe", ["UTF-8"]),
    "a list": (b"[]", ["object"]),
    "unknown field": (b'{"nodeSelectors": {}}', ["nodeSelectors"]),
    "snake case": (b'{"node_selector": {}}', ["node_selector"]),
    "wrong type": (b'{"labels": {"team": 1}}', ["labels.team", "string"]),
    "a label that is none": (b'{"labels": {"team": "a b"}}', ["labels.team"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_pod_defaults_are_reported_with_their_file(tmp_path: Path, name: str) -> None:
    content, words = BAD_FILES[name]
    path = tmp_path / "pods.json"
    path.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        read_settings(IMAGE | {"MILLSTREAM_POD_DEFAULTS": str(path)})
    said = str(caught.value)
    assert said.startswith(f"MILLSTREAM_POD_DEFAULTS: {path}: ")
    assert "\n" not in said
    assert ": : " not in said
    for word in words:
        assert word in said


def test_empty_pod_defaults_are_none(tmp_path: Path) -> None:
    (tmp_path / "pods.json").write_text("")
    assert read_settings(IMAGE | {"MILLSTREAM_POD_DEFAULTS": str(tmp_path / "pods.json")}) == read_settings(IMAGE)


def test_the_process_ends_with_one_line_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MILLSTREAM_RUNTIME_IMAGE", raising=False)
    assert __main__.main() == 2
    assert capsys.readouterr().err == (
        "millstream-operator: MILLSTREAM_RUNTIME_IMAGE is empty; it must name the runtime's image.\n"
    )


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    """The address stands in every ScaledObject, and a refusal stands in the log."""
    with pytest.raises(SettingsError, match="holds credentials") as refused:
        read_settings(IMAGE | {"MILLSTREAM_PROMETHEUS_URL": "http://admin:hunter2@prometheus:9090"})
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"ingress": [{"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}]}, "give either ipBlock"),
        ({"dns": [{}]}, "give either ipBlock"),
        ({"ingress": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["192.0.2.0/24"]}}]}, "must lie inside"),
        ({"ingress": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.0.0.0/8"]}}]}, "be smaller"),
        ({"ingress": [{"ipBlock": {"cidr": "::::/0"}}]}, "must be a block of addresses such as"),
    ],
)
def test_a_peer_that_the_api_server_would_refuse_in_every_policy_is_refused_at_the_start(
    network: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        read_settings({"MILLSTREAM_RUNTIME_IMAGE": "r:1", "MILLSTREAM_NETWORK": json.dumps(network)})
