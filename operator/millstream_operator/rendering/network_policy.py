"""What may talk to the pods: anyone to the HTTP port, and they to DNS alone, since a local model needs no network.

Who may reach the Service from where is the cluster's business; that an inference pod cannot call out is ours.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.rendering.names import HTTP_PORT_NAME, child, selector_labels

DNS_PORT = 53


def network_policy(owner: LLMDeployment) -> dict[str, Any]:
    return child(owner, "networking.k8s.io/v1", "NetworkPolicy") | {
        "spec": {
            "podSelector": {"matchLabels": selector_labels(owner.name)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"ports": [{"port": HTTP_PORT_NAME, "protocol": "TCP"}]}],
            "egress": [{"ports": [{"port": DNS_PORT, "protocol": protocol} for protocol in ("UDP", "TCP")]}],
        },
    }
