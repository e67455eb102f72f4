"""The NetworkPolicy of a deployment's pods: ingress to the HTTP port from anywhere, egress to DNS only.

A model that is downloaded also needs egress by TCP to the hub and its content network. The pods that inspect a model
need the same, so the policy covers every pod of the deployment. Who may reach the Service is left to the cluster's own
policies.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.planning.requires import draft_source
from millstream_operator.rendering.model_source import downloads
from millstream_operator.rendering.names import DEPLOYMENT_LABEL, HTTP_PORT_NAME, child
from millstream_runtime.config import CAPABILITIES, Capabilities

DNS_PORT = 53


def network_policy(owner: LLMDeployment, runtime: Capabilities = CAPABILITIES) -> dict[str, Any]:
    """Return the policy. A draft model counts once the runtime has draft models: before, its spec is refused."""
    egress: list[dict[str, Any]] = [
        {"ports": [{"port": DNS_PORT, "protocol": protocol} for protocol in ("UDP", "TCP")]}
    ]
    draft = draft_source(owner.spec) if "DraftModel" in runtime.speculation_methods else None
    if any(downloads(source) for source in (owner.spec.model.source, draft) if source is not None):
        egress.append({"ports": [{"protocol": "TCP"}]})
    return child(owner, "networking.k8s.io/v1", "NetworkPolicy") | {
        "spec": {
            "podSelector": {"matchLabels": {DEPLOYMENT_LABEL: owner.name}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"ports": [{"port": HTTP_PORT_NAME, "protocol": "TCP"}]}],
            "egress": egress,
        },
    }
