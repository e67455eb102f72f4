"""LLMDeployments for tests, and how to read them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from e2e.cluster import Cluster, Object, eventually

MODEL = "demo-chat"
READY_TIMEOUT_SECONDS = 180.0
PULL_TIMEOUT_SECONDS = 900.0  # five gigabytes and their unpacking, on a machine that others use too
CHILD_KINDS = "deployment,service,serviceaccount,networkpolicy,controllerrevision,configmap"


@dataclass(frozen=True, slots=True)
class Served:
    """A model that serves, for tests that leave it as it is."""

    namespace: str
    name: str
    url: str  # a forwarded port of its Service


# Where the expected numbers are float32: `auto` means bfloat16 products on a CPU that multiplies such numbers.
ENGINE: Object = {"maxModelLen": 2048, "maxNumSeqs": 8}
FLOAT32_ENGINE: Object = ENGINE | {"dtype": "float32"}


def llmd(name: str, **spec: Any) -> Object:
    """The demo model on a CPU, small enough that several fit on a two-core node; `spec` replaces whole fields."""
    base = {
        "model": {"servedName": MODEL, "source": {"local": {"path": MODEL}}},
        "accelerator": {"type": "CPU"},
        "engine": ENGINE,
        "podTemplate": {
            "spec": {
                "containers": [
                    {
                        "name": "runtime",
                        "resources": {
                            "requests": {"cpu": "50m", "memory": "512Mi"},
                            "limits": {"memory": "2Gi"},
                        },
                    }
                ]
            }
        },
    }
    return {
        "apiVersion": "millstream.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": base | spec,
    }


def service_of_others(name: str) -> Object:
    """A Service whose name an LLMDeployment needs for its own."""
    spec = {"ports": [{"port": 1234}], "selector": {"app": "somebody-else"}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def read(cluster: Cluster, namespace: str, name: str) -> Object:
    """The object as the API server has it."""
    return cluster.get("llmd", name, "-n", namespace)


def condition(deployment: Object, kind: str) -> Object:
    """A condition, or an empty one."""
    conditions = (deployment.get("status") or {}).get("conditions") or []
    return next((item for item in conditions if item["type"] == kind), {})


def is_ready(deployment: Object) -> bool:
    """Ready, and for the generation that is there now."""
    ready = condition(deployment, "Ready")
    generation = deployment["metadata"]["generation"]
    return ready.get("status") == "True" and ready.get("observedGeneration") == generation


def wait_ready(
    cluster: Cluster, namespace: str, name: str, *, timeout_seconds: float = READY_TIMEOUT_SECONDS
) -> Object:
    """Wait until the current generation is Ready."""
    return eventually(
        lambda: read(cluster, namespace, name), is_ready, what=f"{name} Ready", timeout_seconds=timeout_seconds
    )


def has_image(cluster: Cluster, reference: str) -> bool:
    """Whether a node has the image already. A node names its fifty largest."""
    nodes = cluster.items("nodes")
    return any(reference in image.get("names", ()) for node in nodes for image in node["status"].get("images", ()))


def pods(cluster: Cluster, namespace: str, name: str) -> list[Object]:
    """The pods that serve a deployment and are not on their way out."""
    selector = f"millstream.dev/deployment={name},millstream.dev/role=leader"
    found = cluster.items("pods", "-n", namespace, "-l", selector)
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def uid_and_restarts(pod: Object) -> tuple[str, int]:
    """What a restart changes. A pod that its kubelet has not reported yet has no containerStatuses, and no restarts."""
    return pod["metadata"]["uid"], sum(one["restartCount"] for one in pod["status"].get("containerStatuses") or ())


def children(cluster: Cluster, namespace: str, name: str) -> set[tuple[str, str]]:
    """(kind, name) of everything that the LLMDeployment owns."""
    return {
        (item["kind"], item["metadata"]["name"])
        for item in cluster.items(CHILD_KINDS, "-n", namespace)
        if any(o["kind"] == "LLMDeployment" and o["name"] == name for o in item["metadata"].get("ownerReferences", []))
    }


def boot_config(cluster: Cluster, namespace: str, pod_spec: Object) -> Object:
    """The configuration of a pod at its start: boot.json of the ConfigMap that it mounts."""
    volume = next(volume for volume in pod_spec["volumes"] if volume["name"] == "config")
    name = volume["projected"]["sources"][0]["configMap"]["name"]
    config: Object = json.loads(cluster.get("configmap", name, "-n", namespace)["data"]["boot.json"])
    return config
