"""The Deployment that runs the replicas."""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.planning.planner import progress_deadline_seconds
from millstream_operator.rendering.names import child, selector_labels

REVISION_HISTORY_LIMIT = 2  # ReplicaSets; what to roll back to is the ControllerRevisions' business


def deployment(owner: LLMDeployment, template: dict[str, Any]) -> dict[str, Any]:
    """One Deployment around a pinned pod template. A new pod comes up before an old one leaves."""
    return child(owner, "apps/v1", "Deployment") | {
        "spec": {
            "replicas": owner.spec.replicas,
            "selector": {"matchLabels": selector_labels(owner.name)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "progressDeadlineSeconds": progress_deadline_seconds(owner.spec),
            "revisionHistoryLimit": REVISION_HISTORY_LIMIT,
            "template": template,
        },
    }
