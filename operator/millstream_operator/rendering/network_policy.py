"""The NetworkPolicy of a deployment's pods: ingress to the HTTP port from anywhere, egress to DNS only.

A model that is downloaded also needs egress by TCP to the hub and its content network. The pods that inspect a model
need the same, so the policy covers every pod of the deployment. Who may reach the Service is left to the cluster's own
policies.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.rendering.model_source import downloads
from millstream_operator.rendering.names import DEPLOYMENT_LABEL, HTTP_PORT_NAME, child

DNS_PORT = 53


def network_policy(owner: LLMDeployment) -> dict[str, Any]:
    egress: list[dict[str, Any]] = [
        {"ports": [{"port": DNS_PORT, "protocol": protocol} for protocol in ("UDP", "TCP")]}
    ]
    if downloads(owner.spec.model.source):
        egress.append({"ports": [{"protocol": "TCP"}]})
    return child(owner, "networking.k8s.io/v1", "NetworkPolicy") | {
        "spec": {
            "podSelector": {"matchLabels": {DEPLOYMENT_LABEL: owner.name}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"ports": [{"port": HTTP_PORT_NAME, "protocol": "TCP"}]}],
            "egress": egress,
        },
    }
