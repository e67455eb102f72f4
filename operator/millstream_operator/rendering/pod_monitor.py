"""A PodMonitor for the runtime's /metrics.

Of pods, not of the Service: pods that load, drain or fail must be visible, and a Service drops a pod that drains. It
also holds when something other than one Service routes to the pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.rendering.names import DEPLOYMENT_LABEL, HTTP_PORT_NAME, child, selector_labels


def pod_monitor(owner: LLMDeployment, labels: Mapping[str, str]) -> dict[str, Any]:
    """`labels` are added to its own, for a Prometheus that selects by them."""
    made = child(owner, "monitoring.coreos.com/v1", "PodMonitor")
    made["metadata"]["labels"] = {**labels, **made["metadata"]["labels"]}
    return made | {
        "spec": {
            "selector": {"matchLabels": selector_labels(owner.name)},
            "podTargetLabels": [DEPLOYMENT_LABEL],
            "podMetricsEndpoints": [{"port": HTTP_PORT_NAME, "path": "/metrics"}],
        }
    }
