"""The Deployment that runs the replicas."""

from __future__ import annotations

import re
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
# The replicas of which a held rollout holds some: another writer of spec.replicas changes no share of them.
HELD_OF_ANNOTATION = "millstream.dev/shifting-replicas"
# One pod at a time either way: a new revision that fails has failed in one pod, and the others never meet it.
ROLLING_UPDATES = {
    AppliedStrategy.AVAILABILITY: {"maxSurge": 1, "maxUnavailable": 0},
    AppliedStrategy.RESOURCE_AWARE: {"maxSurge": 0, "maxUnavailable": 1},
}
# A held rollout: new pods are ready and serve, and are not "available" for 68 years, so the controller goes no further.
# The API server wants the deadline to be longer; the largest number means that there is none.
HELD_MIN_READY_SECONDS = 2**31 - 2
NO_DEADLINE_SECONDS = 2**31 - 1
_COUNT = re.compile("[1-9][0-9]{0,8}")  # somebody may have edited it


def deployment(
    owner: LLMDeployment,
    template: dict[str, Any],
    strategy: AppliedStrategy = AppliedStrategy.AVAILABILITY,
    held: int | None = None,
) -> dict[str, Any]:
    """One Deployment around a pinned pod template.

    With ResourceAware, a new pod may wait for the GPUs of one that drains, so the deadline is longer. `held`: with
    Availability, hold at this many new pods, at least 1. Of N replicas the controller keeps N - maxUnavailable
    available pods, which only old ones are, and makes N + maxSurge in all:

        maxSurge 1, maxUnavailable held - 1   ->   N + 1 - held old pods, held new ones
    """
    waits = drain_timeout_seconds(owner.spec) if strategy is AppliedStrategy.RESOURCE_AWARE else 0
    rendered = child(owner, "apps/v1", "Deployment")
    queue = queue_labels(template["metadata"].get("labels") or {})
    if queue == queue_labels(owner.metadata.labels):  # of the pinned pods; podTemplate may name a queue for them alone
        rendered["metadata"]["labels"] |= queue
    recorded = [BUDGETED_ANNOTATION] if _is_budget_enforced(owner) else []
    recorded += [HELD_OF_ANNOTATION] if held is not None else []
    if recorded:
        rendered["metadata"]["annotations"] = dict.fromkeys(recorded, str(owner.spec.replicas))
    rolling, deadline_seconds = ROLLING_UPDATES[strategy], progress_deadline_seconds(owner.spec) + waits
    holds: dict[str, Any] = {}
    if held is not None:
        rolling, deadline_seconds = {**rolling, "maxUnavailable": held - 1}, NO_DEADLINE_SECONDS
        holds = {"minReadySeconds": HELD_MIN_READY_SECONDS}
    return rendered | {
        "spec": {
            "replicas": owner.spec.replicas,
            "selector": {"matchLabels": selector_labels(owner.name)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": rolling},
            "progressDeadlineSeconds": deadline_seconds,
            "revisionHistoryLimit": REVISION_HISTORY_LIMIT,
            "template": template,
            **holds,
        },
    }


def _is_budget_enforced(owner: LLMDeployment) -> bool:
    return owner.spec.budget is not None and owner.spec.budget.enforcement is not BudgetEnforcement.OBSERVE


def held_at(live: dict[str, Any]) -> int | None:
    """Return the number of new pods that a live Deployment holds at; None where it does not hold."""
    spec = live["spec"]
    if spec.get("minReadySeconds") != HELD_MIN_READY_SECONDS:
        return None
    found = ((spec.get("strategy") or {}).get("rollingUpdate") or {}).get("maxUnavailable", 0)
    return found + 1 if isinstance(found, int) else None  # a percentage is somebody else's edit


def held_of(live: dict[str, Any]) -> int | None:
    """Return of how many replicas it holds them, as it was rendered; None where an older version rendered it."""
    recorded = (live["metadata"].get("annotations") or {}).get(HELD_OF_ANNOTATION, "")
    return int(recorded) if _COUNT.fullmatch(recorded) else None
