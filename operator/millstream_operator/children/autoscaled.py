"""The condition `Autoscaled`, from the live autoscaler's own conditions. Pure.

An autoscaler that cannot read its metric silently does nothing. So the status repeats what its controller says.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.diagnosis.conditions import AUTOSCALED, Condition, find
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.rendering.scaling_policy import in_words

Manifest = dict[str, Any]
HELP = "docs/autoscaling.md says what it needs."
# For people; the API accepts 4096.
MESSAGE_LIMIT_CHARACTERS = 1000


def autoscaled(owner: LLMDeployment, live: Manifest) -> Condition:
    """Return the condition for `live`, the owner's HorizontalPodAutoscaler or ScaledObject."""
    conditions = (live.get("status") or {}).get("conditions") or []
    if live["kind"] == "ScaledObject":
        return _by_keda(owner, conditions)
    return _by_hpa(owner, conditions)


def _condition(status: bool | None, reason: Reason, message: str) -> Condition:
    return Condition(AUTOSCALED, status, reason, message[:MESSAGE_LIMIT_CHARACTERS])


def _by_hpa(owner: LLMDeployment, conditions: list[Manifest]) -> Condition:
    if owner.spec.replicas == 0:
        message = "spec.replicas is 0, which switches a HorizontalPodAutoscaler off; scale to 1 or more to start it."
        return _condition(False, Reason.SCALED_TO_ZERO, message)
    able, active = find(conditions, "AbleToScale"), find(conditions, "ScalingActive")
    if able.get("status") == "False":
        return _condition(False, Reason.AUTOSCALER_FAILING, _from_condition("HorizontalPodAutoscaler", able))
    if active.get("status") == "False" and active.get("reason") != "ScalingDisabled":
        return _condition(False, Reason.METRICS_UNAVAILABLE, _from_condition("HorizontalPodAutoscaler", active))
    if active.get("status") == "True":
        return _autoscaling(owner, "A HorizontalPodAutoscaler")
    return _condition(None, Reason.AUTOSCALER_STARTING, "The HorizontalPodAutoscaler has no conditions yet.")


def _by_keda(owner: LLMDeployment, conditions: list[Manifest]) -> Condition:
    ready, active = find(conditions, "Ready"), find(conditions, "HPAActive")
    if ready.get("status") == "False":
        return _condition(False, Reason.AUTOSCALER_FAILING, _from_condition("ScaledObject", ready))
    if active.get("status") == "False":
        return _condition(False, Reason.METRICS_UNAVAILABLE, _from_condition("ScaledObject", active))
    if ready.get("status") != "True":
        return _condition(None, Reason.AUTOSCALER_STARTING, "KEDA has not set the ScaledObject's Ready condition yet.")
    if owner.spec.replicas == 0:
        message = "Idle at 0 replicas. No request wakes it: set autoscaling.minReplicas to 1 or more."
        return _condition(True, Reason.AUTOSCALING, message)
    return _autoscaling(owner, "KEDA")


def _autoscaling(owner: LLMDeployment, who: str) -> Condition:
    wanted = owner.spec.autoscaling
    words = in_words(wanted) if wanted is not None else "the replicas"
    return _condition(True, Reason.AUTOSCALING, f"{who} keeps {words}.")


def _from_condition(who: str, condition: Manifest) -> str:
    return f"The {who} says: {condition.get('message') or condition.get('reason') or 'nothing'}. {HELP}"
