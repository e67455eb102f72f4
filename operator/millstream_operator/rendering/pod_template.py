"""The pod of a replica. A change of anything here restarts the pods.

    image's own  <  planner's  <  chart's pod defaults  <  spec.podTemplate

A pod meets the restricted Pod Security profile. It listens before its weights are loaded, so `/ready` is probed every
second from the start, and a ready pod is used within a second. On SIGTERM the runtime keeps serving for a moment, then
drains, so no preStop hook is needed; the grace period covers the longest drain.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.pod_template import Container, PodMetadata, PodSpec, PodTemplate
from millstream_operator.api.quantity import canonical
from millstream_operator.api.spec import AcceleratorType
from millstream_operator.planning.plan import GPU_RESOURCE, Plan
from millstream_operator.planning.pod_resources import TMP_BYTES, shared_memory_bytes
from millstream_operator.rendering.affinity import pod_affinity
from millstream_operator.rendering.api_keys import api_keys_mounts, api_keys_volumes
from millstream_operator.rendering.config_maps import CONFIG_ARGS, config_mount, config_volume
from millstream_operator.rendering.container_resources import container_resources
from millstream_operator.rendering.kueue import queue_labels
from millstream_operator.rendering.model_source import ModelFiles, model_files, pull_secret_names
from millstream_operator.rendering.names import (
    HTTP_PORT_NAME,
    LEADER,
    ROLE_LABEL,
    RUNTIME_CONTAINER,
    common_labels,
    selector_labels,
)
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.runtime_config import RUNTIME_PORT, boot_config

NON_ROOT_ID = 65532
DRAIN_MARGIN_SECONDS = 30  # after the drain: closing connections, leaving the process
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": NON_ROOT_ID,
    "runAsGroup": NON_ROOT_ID,
    "fsGroup": NON_ROOT_ID,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


def pod_template(deployment: LLMDeployment, plan: Plan, defaults: PodDefaults) -> dict[str, Any]:
    """A PodTemplateSpec without empty fields, as the API server would store it."""
    overlay = deployment.spec.pod_template or PodTemplate()
    metadata, spec = overlay.metadata or PodMetadata(), overlay.spec or PodSpec()
    labels = {
        **defaults.labels,
        **(metadata.labels or {}),
        **queue_labels(deployment.metadata.labels),
        **common_labels(deployment.name),
        ROLE_LABEL: LEADER,
        # What the inference gateway reads: our metrics speak that dialect.
        "llm-d.ai/engine-type": "vllm",
        "llm-d.ai/role": "both",
    }
    annotations = {**defaults.annotations, **(metadata.annotations or {}), **_prometheus()}
    return {
        "metadata": {"labels": labels, "annotations": annotations},
        "spec": _pod_spec(deployment, plan, defaults, spec),
    }


def _pod_spec(owner: LLMDeployment, plan: Plan, defaults: PodDefaults, overlay: PodSpec) -> dict[str, Any]:
    name, container = owner.name, next(iter(overlay.containers or []), None)
    model = model_files(owner, plan, container_env(container), CONTAINER_SECURITY)
    optional = {
        "nodeSelector": {**defaults.node_selector, **(overlay.node_selector or {})},
        "tolerations": tolerations(plan.accelerator, defaults, overlay),
        "affinity": pod_affinity(overlay.affinity, plan.product_labels),
        "priorityClassName": overlay.priority_class_name or defaults.priority_class_name,
        "runtimeClassName": overlay.runtime_class_name,
        "initContainers": [*map(defaults.of_download, model.init_containers)],
        "imagePullSecrets": defaults.pull_secrets(pull_secret_names(owner)),
    }
    return {
        "serviceAccountName": name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": plan.drain_timeout_seconds + DRAIN_MARGIN_SECONDS,
        "securityContext": {**POD_SECURITY, **model.pod_security},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": selector_labels(name)},
                "matchLabelKeys": ["pod-template-hash"],
            }
        ],
        "containers": [_container(plan, container, model)],
        "volumes": [
            tmp_volume(),
            config_volume(name, boot_config(plan).config_hash()),
            *_shared_memory(plan),
            *api_keys_volumes(plan.api_keys),
            *model.volumes,
        ],
        **{key: value for key, value in optional.items() if value},
    }


def _container(plan: Plan, overlay: Container | None, model: ModelFiles) -> dict[str, Any]:
    return {
        "name": RUNTIME_CONTAINER,
        "image": plan.runtime_image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["serve", *CONFIG_ARGS],
        "env": container_env(overlay),
        "ports": [{"name": HTTP_PORT_NAME, "containerPort": RUNTIME_PORT, "protocol": "TCP"}],
        "resources": container_resources(plan.resources, overlay.resources if overlay is not None else None),
        "startupProbe": {**_get("/ready"), "periodSeconds": 1, "timeoutSeconds": 3} | _budget(plan),
        "readinessProbe": {**_get("/ready"), "periodSeconds": 2, "timeoutSeconds": 3, "failureThreshold": 2},
        "livenessProbe": {**_get("/health"), "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
        "terminationMessagePolicy": "File",
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            config_mount(),
            *({"name": volume["name"], "mountPath": "/dev/shm"} for volume in _shared_memory(plan)),  # noqa: S108
            *api_keys_mounts(plan.api_keys),
            *model.mounts,
        ],
    }


def _shared_memory(plan: Plan) -> list[dict[str, Any]]:
    """Return shared memory for the communication of several ranks."""
    size_bytes = shared_memory_bytes(plan.tensor_parallel_size)
    if not size_bytes:
        return []
    return [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": canonical(f"{size_bytes >> 20}Mi")}}]


def tmp_volume() -> dict[str, Any]:
    """Return the volume of /tmp, the only folder that a container may write to besides the model's."""
    return {"name": "tmp", "emptyDir": {"sizeLimit": canonical(f"{TMP_BYTES >> 20}Mi")}}


def _get(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": HTTP_PORT_NAME, "scheme": "HTTP"}}


def _budget(plan: Plan) -> dict[str, int]:
    """Return a startup probe: one try per second for as long as the warm-up may take."""
    return {"failureThreshold": plan.warmup_timeout_seconds}


def _prometheus() -> dict[str, str]:
    return {"prometheus.io/scrape": "true", "prometheus.io/path": "/metrics", "prometheus.io/port": str(RUNTIME_PORT)}


def tolerations(accelerator: AcceleratorType, defaults: PodDefaults, overlay: PodSpec) -> list[dict[str, Any]]:
    """GPU nodes are usually tainted with the resource's own name, so a GPU pod tolerates that."""
    given = [*defaults.tolerations, *(overlay.tolerations or [])]
    rendered = [toleration.model_dump(mode="json", by_alias=True, exclude_none=True) for toleration in given]
    if accelerator is AcceleratorType.GPU:
        rendered.append({"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"})
    return rendered


def container_env(overlay: Container | None) -> list[dict[str, Any]]:
    """The runtime container's environment; downloads and inspections have the same, for mirrors and proxies."""
    given = overlay.env if overlay is not None and overlay.env is not None else []
    rendered = [variable.model_dump(mode="json", by_alias=True, exclude_none=True) for variable in given]
    return [{"name": "HOME", "value": "/tmp"}, *rendered]  # noqa: S108 - the only writable folder
