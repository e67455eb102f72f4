"""The operator's own configuration, from environment variables (the chart writes them).

MILLSTREAM_RUNTIME_IMAGE    image of new plans whose spec names none (required)
MILLSTREAM_POD_DEFAULTS     JSON file with defaults of the pods
MILLSTREAM_PROMETHEUS_URL   where KEDA asks for metrics; empty: KEDA is not used
MILLSTREAM_MONITORING_LABELS
                            JSON object: labels of PodMonitors and PrometheusRules
MILLSTREAM_NETWORK          JSON object: mode, ingress, dns and dnsPorts of the models' NetworkPolicies
MILLSTREAM_DISCOVERY_SECONDS
                            how often optional kinds are discovered and listed, 5 to 3600
MILLSTREAM_RECHECK_SECONDS  how soon the operator looks again at what it does not watch, 2 to 3600
MILLSTREAM_WATCH_NAMESPACES comma-separated; empty: all namespaces
MILLSTREAM_LOG_LEVEL        DEBUG, INFO, WARNING or ERROR
MILLSTREAM_HEALTH_PORT      where /healthz, /readyz and /metrics answer
MILLSTREAM_SERVICE_ACCESS   Direct (by DNS), or Proxy (through the API server) for an operator outside the cluster
MILLSTREAM_LEADER_ELECTION  Enabled, or Disabled where this is certainly the only operator
MILLSTREAM_OPERATOR_NAMESPACE, MILLSTREAM_LEASE_NAME
                            the Lease. The defaults are those of the documented release, so that an operator started
                            by hand outside the cluster stands by while that one runs
MILLSTREAM_PROBE_KEY_SECRET the Secret in that namespace from which the keys of the probe are derived
MILLSTREAM_GPU_CATALOG      YAML file with own prices and GPUs, read again when it changes
MILLSTREAM_NODE_POOLS       JSON list: node pools with GPUs that an autoscaler may grow from zero
MILLSTREAM_MAX_ADOPTIONS    how many LLMDeployments that follow the operator adopt another plan at a time, 1 to 1000
MILLSTREAM_INVENTORY        Enabled, or Disabled to plan without reading nodes
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from millstream_operator.api.base import LabelValue, QualifiedName
from millstream_operator.api.validation.field_errors import field_error
from millstream_operator.diagnosis.plan_refused import RECHECK_SECONDS
from millstream_operator.inventory.node_pools import NodePool, read_node_pools
from millstream_operator.kube.optional_kinds import DISCOVERY_SECONDS
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.reconciling.defaults import Defaults
from millstream_operator.rendering.companions import CompanionDefaults
from millstream_operator.rendering.network_policy import NetworkDefaults
from millstream_operator.rendering.pod_defaults import load_pod_defaults
from millstream_operator.rollout.adoption_limit import MAX_CONCURRENT_ADOPTIONS

LOG_LEVELS = {name: logging.getLevelNamesMapping()[name] for name in ("DEBUG", "INFO", "WARNING", "ERROR")}
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_PROMETHEUS_URL = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")
_LABELS = TypeAdapter(dict[QualifiedName, LabelValue])
_LEASE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class SettingsError(ValueError):
    """An environment variable has a value that cannot work. `str()` is one sentence."""


@dataclass(frozen=True, slots=True)
class Settings:
    defaults: Defaults
    watch_namespaces: tuple[str, ...]  # empty: all namespaces
    log_level: int
    health_port: int
    service_access_by_proxy: bool  # development: the operator runs outside the cluster
    leader_election: bool
    operator_namespace: str  # of the Lease
    lease_name: str
    probe_key_secret: str  # in the operator's namespace
    discovery_seconds: float = DISCOVERY_SECONDS  # between two discoveries of optional kinds
    recheck_seconds: float = RECHECK_SECONDS  # until the operator looks again at what it does not watch
    gpu_catalog: Path | None = None  # own prices and parts, applied over the shipped catalogue
    node_pools: tuple[NodePool, ...] = ()  # that an autoscaler may grow from zero
    max_adoptions: int = MAX_CONCURRENT_ADOPTIONS  # LLMDeployments that adopt another plan at a time
    inventory: bool = True  # watch the cluster's nodes and the GPUs that pods hold


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read the settings from the environment variables that are listed above.

    Raises:
        SettingsError: one sentence that names the variable, its value and what it may be.
    """
    image = environment.get("MILLSTREAM_RUNTIME_IMAGE", "").strip()
    if not image:
        raise SettingsError("MILLSTREAM_RUNTIME_IMAGE is empty; it must name the runtime's image.")
    try:
        pods = load_pod_defaults(environment.get("MILLSTREAM_POD_DEFAULTS"))
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return Settings(
        defaults=Defaults(PlanDefaults(runtime_image=image), pods, _companions(environment), _network(environment)),
        watch_namespaces=_namespaces(environment),
        log_level=_choice(environment, "MILLSTREAM_LOG_LEVEL", LOG_LEVELS, "INFO"),
        health_port=_port(environment.get("MILLSTREAM_HEALTH_PORT") or "8080"),
        service_access_by_proxy=bool(
            _choice(environment, "MILLSTREAM_SERVICE_ACCESS", {"Direct": 0, "Proxy": 1}, "Direct")
        ),
        leader_election=bool(
            _choice(environment, "MILLSTREAM_LEADER_ELECTION", {"Enabled": 1, "Disabled": 0}, "Enabled")
        ),
        operator_namespace=_name(environment, "MILLSTREAM_OPERATOR_NAMESPACE", _NAMESPACE, "millstream-system"),
        lease_name=_name(environment, "MILLSTREAM_LEASE_NAME", _LEASE_NAME, "millstream"),
        probe_key_secret=_name(environment, "MILLSTREAM_PROBE_KEY_SECRET", _LEASE_NAME, "millstream-probe-key"),
        discovery_seconds=_seconds(environment, "MILLSTREAM_DISCOVERY_SECONDS", DISCOVERY_SECONDS, 5, 3600),
        recheck_seconds=_seconds(environment, "MILLSTREAM_RECHECK_SECONDS", RECHECK_SECONDS, 2, 3600),
        max_adoptions=_count(environment, "MILLSTREAM_MAX_ADOPTIONS", MAX_CONCURRENT_ADOPTIONS, 1, 1000),
        gpu_catalog=Path(path) if (path := environment.get("MILLSTREAM_GPU_CATALOG", "")) else None,
        node_pools=_node_pools(environment),
        inventory=bool(_choice(environment, "MILLSTREAM_INVENTORY", {"Enabled": 1, "Disabled": 0}, "Enabled")),
    )


def _namespaces(environment: Mapping[str, str]) -> tuple[str, ...]:
    parts = map(str.strip, environment.get("MILLSTREAM_WATCH_NAMESPACES", "").split(","))
    names = tuple(filter(None, parts))
    for name in names:
        if not _NAMESPACE.fullmatch(name):
            raise SettingsError(
                f"MILLSTREAM_WATCH_NAMESPACES holds {name!r}, which is no namespace name; give names such as "
                "team-a,team-b."
            )
    return names


def _name(environment: Mapping[str, str], variable: str, pattern: re.Pattern[str], default: str) -> str:
    value = environment.get(variable, "") or default
    if not pattern.fullmatch(value):
        raise SettingsError(
            f"{variable} is {value[:80]!r}; it must be a name of lower-case letters, digits and dashes."
        )
    return value


def _choice(environment: Mapping[str, str], variable: str, choices: Mapping[str, int], default: str) -> int:
    value = environment.get(variable, "") or default
    if value not in choices:
        raise SettingsError(f"{variable} is {value!r}; it must be one of {', '.join(choices)}.")
    return choices[value]


def _seconds(environment: Mapping[str, str], variable: str, default: float, least: int, most: int) -> float:
    value = environment.get(variable, "").strip()
    if not value:
        return default
    if not re.fullmatch("[0-9]{1,5}", value) or not least <= int(value) <= most:
        raise SettingsError(f"{variable} is {value[:20]!r}; it must be whole seconds from {least} to {most}.")
    return float(value)


def _node_pools(environment: Mapping[str, str]) -> tuple[NodePool, ...]:
    try:
        return read_node_pools(environment.get("MILLSTREAM_NODE_POOLS", ""))
    except ValueError as error:
        raise SettingsError(f"MILLSTREAM_NODE_POOLS: {error}") from None


def _count(environment: Mapping[str, str], variable: str, default: int, least: int, most: int) -> int:
    value = environment.get(variable, "").strip()
    if not value:
        return default
    if not re.fullmatch("[0-9]{1,5}", value) or not least <= int(value) <= most:
        raise SettingsError(f"{variable} is {value[:20]!r}; it must be a whole number from {least} to {most}.")
    return int(value)


def _companions(environment: Mapping[str, str]) -> CompanionDefaults:
    url = environment.get("MILLSTREAM_PROMETHEUS_URL", "").strip()
    if "@" in url:  # not shown: everyone who may read a ScaledObject would read the password
        raise SettingsError("MILLSTREAM_PROMETHEUS_URL holds credentials; give the address without them.")
    if url and (len(url) > 2048 or not _PROMETHEUS_URL.fullmatch(url)):
        raise SettingsError(
            f"MILLSTREAM_PROMETHEUS_URL is {url[:80]!r}; it must be a URL such as "
            "http://prometheus.monitoring.svc:9090, without a query."
        )
    try:
        labels = _LABELS.validate_json(environment.get("MILLSTREAM_MONITORING_LABELS", "").strip() or "{}")
    except ValidationError as error:
        said = field_error(error).sentence().removesuffix(".")
        raise SettingsError(f"MILLSTREAM_MONITORING_LABELS: {said}; give a JSON object of labels.") from None
    return CompanionDefaults(url, labels)


def _network(environment: Mapping[str, str]) -> NetworkDefaults:
    text = environment.get("MILLSTREAM_NETWORK", "").strip() or "{}"
    try:
        return NetworkDefaults.model_validate_json(text, by_alias=True, by_name=False)
    except ValidationError as error:
        raise SettingsError(f"MILLSTREAM_NETWORK: {field_error(error).sentence()}") from None


def _port(value: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", value) or not 0 < int(value) < 65536:
        raise SettingsError(f"MILLSTREAM_HEALTH_PORT is {value[:20]!r}; it must be a port from 1 to 65535.")
    return int(value)
