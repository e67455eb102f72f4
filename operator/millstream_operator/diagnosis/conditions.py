"""Conditions as a list-map: a transition time moves only when the status does, and a message only when it says more.

Writing a status wakes the operator that wrote it. So the same state of the cluster must yield the same conditions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_operator.diagnosis.reasons import MESSAGE_HAS_VARYING_NUMBERS, Reason

READY = "Ready"
PLANNED = "Planned"
PODS_SCHEDULED = "PodsScheduled"
WARMED_UP = "WarmedUp"
MODEL_READY = "ModelReady"
AVAILABLE = "Available"
AUTOSCALED = "Autoscaled"  # with spec.autoscaling
DRAFT_TUNED = "DraftTuned"  # with spec.speculation.tuning
MONITORED = "Monitored"  # where the Prometheus operator is installed, or monitoring is asked for
RECONCILING = "Reconciling"  # these are there only while true
STALLED = "Stalled"
NAME_CONFLICT = "NameConflict"
AUTOSCALER_CONFLICT = "AutoscalerConflict"
SELECTED_BY_OTHERS = "SelectedByOthers"
PLAN_OUTDATED = "PlanOutdated"
UNAUTHENTICATED = "Unauthenticated"
API_KEYS_INVALID = "APIKeysInvalid"
REPLICAS_BLOCKED = "ReplicasBlocked"
STATUS_INCOMPLETE = "StatusIncomplete"
ROLLOUT_BLOCKED = "RolloutBlocked"
INSUFFICIENT_EVIDENCE = "InsufficientEvidence"  # of a staged shift of traffic
UNKNOWN_FIELDS = "UnknownFields"
BUDGET_EXCEEDED = "BudgetExceeded"
INSUFFICIENT_REPLICAS = "InsufficientReplicas"
BELOW_PLAN = "BelowPlan"


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    status: bool | None  # None: Unknown
    reason: Reason
    message: str


def merged(
    previous: Iterable[dict[str, Any]], wanted: Sequence[Condition], generation: int, now: str
) -> list[dict[str, Any]]:
    """`wanted` in the API's form, keeping what did not change. `now` is RFC 3339."""
    before = {condition["type"]: condition for condition in previous}
    return [_merged(before.get(condition.type, {}), condition, generation, now) for condition in wanted]


def find(conditions: Iterable[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The condition of a type, or an empty one."""
    return next((condition for condition in conditions if condition["type"] == kind), {})


def _merged(before: dict[str, Any], wanted: Condition, generation: int, now: str) -> dict[str, Any]:
    status = {True: "True", False: "False", None: "Unknown"}[wanted.status]
    same_status = before.get("status") == status
    return {
        "type": wanted.type,
        "status": status,
        "reason": str(wanted.reason),
        "message": before["message"] if _says_the_same(before, wanted) else wanted.message,
        "observedGeneration": generation,
        "lastTransitionTime": before["lastTransitionTime"] if same_status else now,
    }


def _says_the_same(before: dict[str, Any], wanted: Condition) -> bool:
    if before.get("reason") != wanted.reason or wanted.reason not in MESSAGE_HAS_VARYING_NUMBERS:
        return False
    return _without_numbers(before["message"]) == _without_numbers(wanted.message)


def _without_numbers(message: str) -> str:
    return re.sub(r"\d+", "#", message)
