"""What may talk to the pods: anyone to the HTTP port, and they to DNS alone, since a model
that is there needs no network. A model that is downloaded needs one: the hub and its content network by TCP.
The pods that inspect a model need the same and nothing more, so the policy is about every pod of the deployment.

Who may reach the Service from where is the cluster's business; that an inference pod cannot call out is ours.
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
