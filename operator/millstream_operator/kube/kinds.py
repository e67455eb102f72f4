"""The kinds that the operator watches, and where the API server keeps them.

Every kind that a child's health can be read from is here: a common bug of operators is a child whose status is not
watched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millstream_operator.api import GROUP, KIND, PLURAL, VERSION
from millstream_operator.rendering.names import DEPLOYMENT_LABEL


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind; all but Node are namespaced. `owned`: we create and delete it; otherwise we only look."""

    group: str
    version: str
    kind: str
    plural: str
    owned: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """URL path below the API server: of one object, of a namespace's, or of all."""
        base = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [base, *(("namespaces", namespace) if namespace else ()), self.plural, name, subresource]
        return "/".join(part for part in parts if part)


LLM_DEPLOYMENT = Kind(GROUP, VERSION, KIND, PLURAL, owned=False)
POD = Kind("", "v1", "Pod", "pods", owned=False)
NODE = Kind("", "v1", "Node", "nodes", owned=False)  # looked at by `gpu_watch.py`, with what pods hold of its GPUs
REPLICA_SET = Kind("apps", "v1", "ReplicaSet", "replicasets", owned=False)  # by name: whose a pod is
EVENT = Kind("", "v1", "Event", "events", owned=False)
SECRET = Kind("", "v1", "Secret", "secrets", owned=False)  # the operator's own, by name: none is listed or watched
ENDPOINT_SLICE = Kind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices", owned=False)  # the API server's
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases", owned=False)
SERVICE_ACCOUNT = Kind("", "v1", "ServiceAccount", "serviceaccounts")
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps")
SERVICE = Kind("", "v1", "Service", "services")
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments")
CONTROLLER_REVISION = Kind("apps", "v1", "ControllerRevision", "controllerrevisions")
JOB = Kind("batch", "v1", "Job", "jobs")
PERSISTENT_VOLUME_CLAIM = Kind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
POD_DISRUPTION_BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
HORIZONTAL_POD_AUTOSCALER = Kind("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
# Kinds of other projects, which a cluster may have or not (`optional_kinds.py`).
SCALED_OBJECT = Kind("keda.sh", "v1alpha1", "ScaledObject", "scaledobjects")
POD_MONITOR = Kind("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors")
PROMETHEUS_RULE = Kind("monitoring.coreos.com", "v1", "PrometheusRule", "prometheusrules")

OWNED = (
    SERVICE_ACCOUNT,
    NETWORK_POLICY,
    SERVICE,
    POD_DISRUPTION_BUDGET,
    PERSISTENT_VOLUME_CLAIM,
    JOB,
    DEPLOYMENT,
    CONTROLLER_REVISION,
    CONFIG_MAP,
)
# Kinds of our API that own objects, and the label that names the owner on each of its objects, pods included. A second
# kind adds its own row and its own label, so that two owners of one name never share a child, a pod or a GPU.
OWNERS = (LLM_DEPLOYMENT,)
OWNER_LABELS = {DEPLOYMENT_LABEL: LLM_DEPLOYMENT}
WATCHED = (LLM_DEPLOYMENT, *OWNED, HORIZONTAL_POD_AUTOSCALER, POD)
OPTIONAL = (SCALED_OBJECT, POD_MONITOR, PROMETHEUS_RULE)
BY_KIND = {kind.kind: kind for kind in (*WATCHED, *OPTIONAL, EVENT)}


def label_selector(kind: Kind) -> str | None:
    """What the server is asked to send of a kind: children carry our label, LLMDeployments come all."""
    return None if kind is LLM_DEPLOYMENT else DEPLOYMENT_LABEL


def kind_of(manifest: dict[str, Any]) -> Kind:
    return BY_KIND[manifest["kind"]]
