"""The pod of a Job that works on a model before there are replicas: inspecting, quantizing, judging.

It has the model's own node selector, tolerations, environment and pull Secrets, under the restricted profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.pod_template import Container, PodSpec, PodTemplate
from millstream_operator.api.spec import Accelerator, AcceleratorType
from millstream_operator.rendering.affinity import job_affinity
from millstream_operator.rendering.model_source import ModelFiles, pull_secret_names
from millstream_operator.rendering.names import LEADER, ROLE_LABEL, selector_labels
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.pod_template import (
    CONTAINER_SECURITY,
    POD_SECURITY,
    container_env,
    tmp_volume,
    tolerations,
)


def overlay_of(owner: LLMDeployment) -> Container | None:
    """What spec.podTemplate says about the container named runtime."""
    return next(iter(_overlay(owner).containers or []), None)


def job_container(
    owner: LLMDeployment,
    name: str,
    image: str,
    args: Sequence[str],
    resources: Mapping[str, Any],
    mounts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the container that does the work. Its answer is its termination message."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": [*args],
        "env": container_env(overlay_of(owner)),
        "resources": resources,
        "terminationMessagePolicy": "File",
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *mounts],  # noqa: S108
    }


def job_pod_spec(
    owner: LLMDeployment, defaults: PodDefaults, container: dict[str, Any], files: ModelFiles, *, near_replicas: bool
) -> dict[str, Any]:
    """Return the pod's spec without empty fields. `near_replicas`: it mounts a claim that only one node may mount."""
    overlay = _overlay(owner)
    accelerator = (owner.spec.accelerator or Accelerator()).type or AcceleratorType.GPU
    optional = {
        "nodeSelector": {**defaults.node_selector, **(overlay.node_selector or {})},
        "tolerations": tolerations(accelerator, defaults, overlay),
        "priorityClassName": overlay.priority_class_name or defaults.priority_class_name,
        "imagePullSecrets": defaults.pull_secrets(pull_secret_names(owner)),
        "affinity": job_affinity(overlay.affinity, _node_preference(owner) if near_replicas else {}),
        "initContainers": [*map(defaults.of_download, files.init_containers)],
    }
    return {
        "serviceAccountName": owner.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "securityContext": {**POD_SECURITY, **files.pod_security},
        "containers": [defaults.of_download(container)],
        "volumes": [tmp_volume(), *files.volumes],
        **{key: value for key, value in optional.items() if value},
    }


def _overlay(owner: LLMDeployment) -> PodSpec:
    return (owner.spec.pod_template or PodTemplate()).spec or PodSpec()


def _node_preference(owner: LLMDeployment) -> dict[str, Any]:
    """Prefer the node of a pod that serves: a claim that only one node may mount is mounted there."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": selector_labels(owner.name) | {ROLE_LABEL: LEADER}},
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
