"""The list of an LLMDeployment's conditions, in the order in which a person reads them. Pure.

    Ready          the summary, with the reason of the first part that is in its way
    Planned ...    its parts, in the order in which a deployment comes up
    NameConflict   abnormal ones, there only while true
    Reconciling or Stalled

A new condition is a function of `Observation` in a file of its own and one line here.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream_operator.diagnosis import conditions
from millstream_operator.diagnosis.conditions import Condition
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.status.observation import Observation
from millstream_operator.status.pod_progress import pods_scheduled, warmed_up
from millstream_operator.status.readiness import ready, reconciling_or_stalled
from millstream_operator.status.serving import available, model_ready


def observed(observation: Observation, blocker: Diagnosis | None, phase: str | None = None) -> list[Condition]:
    """Ready comes first; what does not hold and is only told while true is left out.

    `blocker` is `readiness.find_blocker(observation)`, `phase` where the slowest pod's warm-up is.
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
    found += (abnormal for look in ABNORMAL if (abnormal := look(observation)) is not None)
    found += (one for one in observation.companions or () if one.type not in {other.type for other in found})
    way = reconciling_or_stalled(observation, summary)
    return [*found, way] if way is not None else found


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


# There only while true: each function gives its condition, or None.
ABNORMAL: tuple[Callable[[Observation], Condition | None], ...] = (_name_conflict, _plan_outdated)
