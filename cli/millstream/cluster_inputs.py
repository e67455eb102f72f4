"""Inputs of `millstream plan` from a cluster: nodes, pods, what its runtimes measured. Each error is one sentence."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.plan_inputs import DEFAULT_NAMESPACE, ClusterObjects, bad_input, read_yaml
from millstream_operator.api import GROUP, PLURAL, VERSION
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.facts.calibration_record import config_map_name, read_entries
from millstream_operator.inventory.nodes import nodes_of, pods_of
from millstream_operator.planning.calibration import NO_CALIBRATION, Calibration
from millstream_runtime.errors import RuntimeFailure

REQUEST_TIMEOUT_SECONDS = 30
MAX_KUBECONFIG_BYTES = 16 << 20
OPERATOR_CONTAINER = "operator"


@dataclass(frozen=True, slots=True)
class InstalledOperator:
    """An operator that runs in the cluster, by the environment of its pod. `watches`: namespaces; empty: all."""

    namespace: str
    lease_name: str
    runtime_image: str
    watches: tuple[str, ...] = ()

    def looks_after(self, namespace: str) -> bool:
        return not self.watches or namespace in self.watches


def objects_of_cluster(kubeconfig: Path, namespace: str) -> ClusterObjects:
    """The nodes of a cluster and, where its user may list them, the pods that hold GPUs.

    With them come the image and the calibration of the operator that looks after `namespace`.
    """
    nodes = _cluster_nodes(kubeconfig)
    try:
        pods = _cluster_pods(kubeconfig)
    except RuntimeFailure as error:
        note = f"Every allocatable GPU counts as free, because pods cannot be listed: {error.message}"
        return ClusterObjects(nodes, notes=(note,), calibration_note="none read, because the operator was not found")
    operators = [one for one in operators_in(pods) if one.looks_after(namespace)]
    if len(operators) != 1:
        found = " and ".join(f"{one.namespace}/{one.lease_name}" for one in operators) or "no pod of one was found"
        return ClusterObjects(nodes, pods, calibration_note=f"none read: not one operator looks after it ({found})")
    (operator,) = operators
    calibration, note = _calibration(kubeconfig, operator)
    return ClusterObjects(nodes, pods, (), calibration, note, operator.runtime_image)


def operators_in(pods: Sequence[Mapping[str, Any]]) -> list[InstalledOperator]:
    """Each operator once, however many replicas it has."""
    found: dict[InstalledOperator, None] = {}
    for pod in pods:
        for container in (pod.get("spec") or {}).get("containers") or ():
            if container.get("name") != OPERATOR_CONTAINER:
                continue
            values = {one.get("name"): one.get("value") or "" for one in container.get("env") or ()}
            image, lease = values.get("MILLSTREAM_RUNTIME_IMAGE"), values.get("MILLSTREAM_LEASE_NAME")
            if image and lease:
                watches = values.get("MILLSTREAM_WATCH_NAMESPACES", "").split(",")
                namespace = pod["metadata"]["namespace"]
                found[InstalledOperator(namespace, lease, image, tuple(filter(None, map(str.strip, watches))))] = None
    return list(found)


def _calibration(kubeconfig: Path, operator: InstalledOperator) -> tuple[Calibration, str]:
    """What the runtimes of this operator measured, and a note for a person."""
    name = config_map_name(operator.lease_name)
    where = f"ConfigMap {operator.namespace}/{name}"

    def read(client: Any, api: Any) -> Any:
        stored = client.CoreV1Api(api).read_namespaced_config_map(
            name, operator.namespace, _request_timeout=REQUEST_TIMEOUT_SECONDS
        )
        return api.sanitize_for_serialization(stored)

    try:
        stored = _ask(kubeconfig, read, f"{where} cannot be read")
    except RuntimeFailure as error:
        return NO_CALIBRATION, f"none read: {error.message}"
    if stored is None:
        return NO_CALIBRATION, f"none: no runtime has measured anything yet ({where} does not exist)"
    entries = read_entries(stored)
    found = Calibration(tuple((key, one.correction) for key, one in entries.items()))
    return found, f"{len(entries)} measurement{'s' if len(entries) != 1 else ''} in {where}"


def live_deployment(kubeconfig: Path, deployment: LLMDeployment) -> dict[str, Any] | None:
    """The LLMDeployment of that name in the cluster, as it is stored; None when there is none."""

    def read(client: Any, api: Any) -> Any:
        namespace = deployment.metadata.namespace or DEFAULT_NAMESPACE
        objects = client.CustomObjectsApi(api)
        place = (GROUP, VERSION, namespace, PLURAL, deployment.name)
        return objects.get_namespaced_custom_object(*place, _request_timeout=REQUEST_TIMEOUT_SECONDS)

    found: dict[str, Any] | None = _ask(kubeconfig, read, "the LLMDeployment cannot be read")
    return found


def _cluster_nodes(kubeconfig: Path) -> list[Any]:
    def read(client: Any, api: Any) -> Any:
        nodes = client.CoreV1Api(api).list_node(_request_timeout=REQUEST_TIMEOUT_SECONDS)
        return api.sanitize_for_serialization(nodes)

    return list(nodes_of(_ask(kubeconfig, read, "the cluster's nodes cannot be listed")))


def _cluster_pods(kubeconfig: Path) -> list[Any]:
    def read(client: Any, api: Any) -> Any:
        bound = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
        pods = client.CoreV1Api(api).list_pod_for_all_namespaces(
            field_selector=bound, _request_timeout=REQUEST_TIMEOUT_SECONDS
        )
        return api.sanitize_for_serialization(pods)

    found = _ask(kubeconfig, read, "the cluster's pods cannot be listed")
    return list(pods_of(found)) if found is not None else []


def _ask(kubeconfig: Path, read: Callable[[Any, Any], Any], failure: str) -> Any:
    """What `read(client module, API client)` returns; None for 404. Planning from files needs no client."""
    try:
        from kubernetes import client, config
    except ModuleNotFoundError:
        raise bad_input("--kubeconfig needs Python's client of Kubernetes: pip install kubernetes.") from None
    if os.pathsep not in str(kubeconfig):  # as in $KUBECONFIG, the client takes several
        _require_kubeconfig(kubeconfig)
    log = _ErrorsOfTheClient()
    logging.getLogger().addHandler(log)
    try:
        return read(client, config.new_client_from_config(str(kubeconfig)))
    except client.ApiException as error:
        if error.status == 404:
            return None
        raise bad_input(f"{kubeconfig}: {failure}: {error.status} {error.reason}{log.sentence}.") from None
    except Exception as error:  # the client raises a dozen unrelated types: files, TLS, sockets
        raise bad_input(f"{kubeconfig}: {failure}: {_words(error)}{log.sentence}.") from None
    finally:
        logging.getLogger().removeHandler(log)


class _ErrorsOfTheClient(logging.Handler):
    """Keeps what the client logs and does not raise: a credential plugin that is not installed, for one.

    With a handler the root logger prints none of it.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self._last = record.getMessage()

    @property
    def sentence(self) -> str:
        """The last error, as the end of a sentence."""
        return f" (before that: {_one_line(self._last)})" if self._last else ""


def _require_kubeconfig(path: Path) -> None:
    """Raises RuntimeFailure: the file cannot be read, or is no mapping."""
    if not isinstance(read_yaml(path, MAX_KUBECONFIG_BYTES), dict):
        raise bad_input(f"{path}: holds no kubeconfig; `kubectl config view --raw` prints yours.")


def _words(error: Exception) -> str:
    """What a person can use of an error. urllib3 wraps the cause in its own classes, addresses and retries."""
    cause = getattr(error, "reason", None)
    if isinstance(cause, Exception):
        where = getattr(getattr(error, "pool", None), "host", "the API server")
        return f"{where} does not answer: {_one_line(str(cause).rpartition(': ')[2])}"
    return _one_line(str(error))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200].rstrip(".")
