"""The Deployment that runs the replicas."""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.status import AppliedStrategy
from millstream_operator.api.workload import BudgetEnforcement
from millstream_operator.planning.timeouts import drain_timeout_seconds, progress_deadline_seconds
from millstream_operator.rendering.kueue import queue_labels
from millstream_operator.rendering.names import child, selector_labels

REVISION_HISTORY_LIMIT = 2  # ReplicaSets; what to roll back to is the ControllerRevisions' business
# The replicas of an owner with an enforced budget: what another writer of spec.replicas adds is known by it.
BUDGETED_ANNOTATION = "millstream.dev/budgeted-replicas"
# One pod at a time either way: a new revision that fails has failed in one pod, and the others never meet it.
ROLLING_UPDATES = {
    AppliedStrategy.AVAILABILITY: {"maxSurge": 1, "maxUnavailable": 0},
    AppliedStrategy.RESOURCE_AWARE: {"maxSurge": 0, "maxUnavailable": 1},
}


def deployment(
    owner: LLMDeployment, template: dict[str, Any], strategy: AppliedStrategy = AppliedStrategy.AVAILABILITY
) -> dict[str, Any]:
    """One Deployment around a pinned pod template.

    With ResourceAware, a new pod may wait for the GPUs of one that drains, so the deadline is longer.
    """
    waits = drain_timeout_seconds(owner.spec) if strategy is AppliedStrategy.RESOURCE_AWARE else 0
    rendered = child(owner, "apps/v1", "Deployment")
    queue = queue_labels(template["metadata"].get("labels") or {})
    if queue == queue_labels(owner.metadata.labels):  # of the pinned pods; podTemplate may name a queue for them alone
        rendered["metadata"]["labels"] |= queue
    if owner.spec.budget is not None and owner.spec.budget.enforcement is not BudgetEnforcement.OBSERVE:
        rendered["metadata"]["annotations"] = {BUDGETED_ANNOTATION: str(owner.spec.replicas)}
    return rendered | {
        "spec": {
            "replicas": owner.spec.replicas,
            "selector": {"matchLabels": selector_labels(owner.name)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": ROLLING_UPDATES[strategy]},
            "progressDeadlineSeconds": progress_deadline_seconds(owner.spec) + waits,
            "revisionHistoryLimit": REVISION_HISTORY_LIMIT,
            "template": template,
        },
    }
