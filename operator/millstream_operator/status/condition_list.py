"""The list of an LLMDeployment's conditions, in the order in which a person reads them. Pure.

    Ready          the summary, with the reason of what blocks it
    Planned ...    its parts, in the order in which a deployment comes up
    NameConflict   abnormal conditions, present only while true
    Reconciling or Stalled

To add a condition, write a function of `Observation` in a file of its own, and add it here.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream_operator.api.stored import in_words
from millstream_operator.api.validation.ratchets import is_exposed
from millstream_operator.diagnosis import conditions
from millstream_operator.diagnosis.conditions import Condition
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.status.api_keys import api_keys_invalid
from millstream_operator.status.budget import budget_exceeded
from millstream_operator.status.kept_plan import below_plan
from millstream_operator.status.load import insufficient_replicas
from millstream_operator.status.observation import Observation
from millstream_operator.status.pod_progress import pods_scheduled, warmed_up
from millstream_operator.status.readiness import ready, reconciling_or_stalled
from millstream_operator.status.scaling import replicas_blocked
from millstream_operator.status.serving import available, model_ready


def conditions_of(observation: Observation, blocker: Diagnosis | None, phase: str | None = None) -> list[Condition]:
    """Return all conditions, Ready first. Abnormal ones that do not hold are absent.

    `blocker` is `blocking_policies.find_blocker(observation)`, `phase` the warm-up phase of the slowest pod.
    """
    summary = ready(observation, blocker, phase)
    found = [
        summary,
        _planned(observation),
        pods_scheduled(observation, blocker),
        warmed_up(observation, blocker, phase),
        model_ready(observation),
        available(observation),
    ]
    found += [observation.draft_tuned] if observation.draft_tuned is not None else []
    found += (abnormal for policy in ABNORMAL if (abnormal := policy(observation)) is not None)
    found += (one for one in observation.companions or () if one.type not in {other.type for other in found})
    progress = reconciling_or_stalled(observation, summary)
    return [*found, progress] if progress is not None else found


def _planned(observation: Observation) -> Condition:
    return Condition(conditions.PLANNED, True, Reason.PLANNED, observation.revision.plan["summary"])


def _name_conflict(observation: Observation) -> Condition | None:
    if observation.problem is None or observation.problem.reason is not Reason.NAME_CONFLICT:
        return None
    return Condition(conditions.NAME_CONFLICT, True, observation.problem.reason, observation.problem.message)


def _plan_outdated(observation: Observation) -> Condition | None:
    if observation.outdated is None:
        return None
    return Condition(conditions.PLAN_OUTDATED, True, observation.outdated.reason, observation.outdated.message)


def _unauthenticated(observation: Observation) -> Condition | None:
    """A Service that was exposed before keys could be asked for serves on, and says so."""
    if not is_exposed(observation.owner.spec):
        return None
    return Condition(
        conditions.UNAUTHENTICATED,
        True,
        Reason.EXPOSED_WITHOUT_AUTHENTICATION,
        "service.type makes the model reachable from outside the cluster, and it asks for no API key: set "
        "auth.apiKeysSecretRef, or say auth.mode: Disabled.",
    )


def _rollout_blocked(observation: Observation) -> Condition | None:
    blocked = observation.rollout.blocked if observation.rollout is not None else None
    if blocked is None:
        return None
    return Condition(conditions.ROLLOUT_BLOCKED, True, blocked.reason, blocked.message)


def _insufficient_evidence(observation: Observation) -> Condition | None:
    comparison = observation.rollout.comparison if observation.rollout is not None else None
    if comparison is None or (lacks := comparison.insufficient) is None:
        return None
    return Condition(conditions.INSUFFICIENT_EVIDENCE, True, lacks.reason, lacks.message)


def _unknown_fields(observation: Observation) -> Condition | None:
    if not observation.unknown_fields:
        return None
    return Condition(conditions.UNKNOWN_FIELDS, True, Reason.UNKNOWN_FIELDS, in_words(observation.unknown_fields))


# Present only while true: each policy returns its condition, or None.
AbnormalPolicy = Callable[[Observation], Condition | None]
ABNORMAL: tuple[AbnormalPolicy, ...] = (
    _name_conflict,
    _plan_outdated,
    _unauthenticated,
    api_keys_invalid,
    replicas_blocked,
    _rollout_blocked,
    _insufficient_evidence,
    _unknown_fields,
    budget_exceeded,
    insufficient_replicas,
    below_plan,
)
