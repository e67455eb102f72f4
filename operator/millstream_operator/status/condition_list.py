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


def observed(seen: Observation, blocker: Diagnosis | None, phase: str | None = None) -> list[Condition]:
    """Ready comes first; what does not hold and is only told while true is left out.

    `blocker` is `readiness.find_blocker(seen)`, `phase` where the slowest pod's warm-up is.
    """
    summary = ready(seen, blocker, phase)
    found = [
        summary,
        _planned(seen),
        pods_scheduled(seen, blocker),
        warmed_up(seen, blocker, phase),
        model_ready(seen),
        available(seen),
    ]
    found += (abnormal for look in ABNORMAL if (abnormal := look(seen)) is not None)
    found += (one for one in seen.companions or () if one.type not in {other.type for other in found})
    way = reconciling_or_stalled(seen, summary)
    return [*found, way] if way is not None else found


def _planned(seen: Observation) -> Condition:
    return Condition(conditions.PLANNED, True, Reason.PLANNED, seen.revision.plan["summary"])


def _name_conflict(seen: Observation) -> Condition | None:
    if seen.problem is None or seen.problem.reason is not Reason.NAME_CONFLICT:
        return None
    return Condition(conditions.NAME_CONFLICT, True, seen.problem.reason, seen.problem.message)


def _plan_outdated(seen: Observation) -> Condition | None:
    if seen.outdated is None:
        return None
    return Condition(conditions.PLAN_OUTDATED, True, seen.outdated.reason, seen.outdated.message)


# There only while true: each function gives its condition, or None.
ABNORMAL: tuple[Callable[[Observation], Condition | None], ...] = (_name_conflict, _plan_outdated)
