"""The kinds that the operator watches, and where the API server keeps them.

Every kind that a child's health can be read from is here: the domain's classic bug is a child whose status nobody
watches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millstream_operator.api import GROUP, KIND, PLURAL, VERSION
from millstream_operator.rendering.names import DEPLOYMENT_LABEL


@dataclass(frozen=True, slots=True)
class Kind:
    """A namespaced kind. `owned`: we create and delete it; otherwise we only look."""

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
EVENT = Kind("", "v1", "Event", "events", owned=False)
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases", owned=False)
SERVICE_ACCOUNT = Kind("", "v1", "ServiceAccount", "serviceaccounts")
SERVICE = Kind("", "v1", "Service", "services")
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments")
CONTROLLER_REVISION = Kind("apps", "v1", "ControllerRevision", "controllerrevisions")
JOB = Kind("batch", "v1", "Job", "jobs")
PERSISTENT_VOLUME_CLAIM = Kind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
POD_DISRUPTION_BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")

OWNED = (
    SERVICE_ACCOUNT,
    NETWORK_POLICY,
    SERVICE,
    POD_DISRUPTION_BUDGET,
    PERSISTENT_VOLUME_CLAIM,
    JOB,
    DEPLOYMENT,
    CONTROLLER_REVISION,
)
WATCHED = (LLM_DEPLOYMENT, *OWNED, POD)
BY_KIND = {kind.kind: kind for kind in (*WATCHED, EVENT)}


def label_selector(kind: Kind) -> str | None:
    """What the server is asked to send of a kind: children carry our label, LLMDeployments come all."""
    return None if kind is LLM_DEPLOYMENT else DEPLOYMENT_LABEL


def kind_of(manifest: dict[str, Any]) -> Kind:
    return BY_KIND[manifest["kind"]]
