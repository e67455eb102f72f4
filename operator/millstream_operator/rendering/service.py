"""The Service in front of the replicas, and its URL."""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.spec import Service, ServiceType
from millstream_operator.rendering.names import HTTP_PORT_NAME, child, selector_labels

DEFAULT_PORT = 80


def service(owner: LLMDeployment) -> dict[str, Any]:
    """One Service port, named http, to the runtime's port of the same name."""
    wanted = owner.spec.service or Service()
    return child(owner, "v1", "Service") | {
        "spec": {
            "type": (wanted.type or ServiceType.CLUSTER_IP).value,
            "selector": selector_labels(owner.name),
            "ports": [
                {
                    "name": HTTP_PORT_NAME,
                    "port": service_port(owner),
                    "targetPort": HTTP_PORT_NAME,
                    "protocol": "TCP",
                    "appProtocol": "http",
                }
            ],
        },
    }


def service_port(owner: LLMDeployment) -> int:
    return (owner.spec.service or Service()).port or DEFAULT_PORT


def service_url(owner: LLMDeployment) -> str:
    """Return `status.url`: the Service's cluster DNS name, without the cluster's domain, which is not known."""
    port = service_port(owner)
    return f"http://{owner.name}.{owner.metadata.namespace}.svc" + ("" if port == DEFAULT_PORT else f":{port}")
