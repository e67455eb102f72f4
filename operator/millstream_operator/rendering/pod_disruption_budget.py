"""The PodDisruptionBudget: a node drain evicts one replica at a time. For one replica it would only block the drain.

A pod that is not ready serves nothing, so it may always be evicted: otherwise a model that fails blocks every drain.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.rendering.names import child, selector_labels


def pod_disruption_budget(owner: LLMDeployment) -> dict[str, Any] | None:
    """Return the budget, or None for fewer than two replicas."""
    if owner.spec.replicas < 2:
        return None
    return child(owner, "policy/v1", "PodDisruptionBudget") | {
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": selector_labels(owner.name)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }
    }
