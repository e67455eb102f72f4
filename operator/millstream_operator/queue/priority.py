"""Which news cannot wait: a spec that nothing was done about yet, before the progress of what was. Pure.

A thousand LLMDeployments applied at once bring several thousand events of their first pods while most of them have no
children yet. In the order of arrival, each step of the first ones would hold up all of the last ones.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.diagnosis.conditions import PLANNED, find
from millstream_operator.kube.kinds import JOB, LLM_DEPLOYMENT, POD, Kind

Manifest = dict[str, Any]


def can_wait(kind: Kind, before: Manifest | None, after: Manifest) -> bool:
    """Is a change progress that may be looked at later? `before`: the object as it was known.

    Not that of the LLMDeployment itself, not a child that somebody made or edited, and nothing a plan waits for.
    """
    if kind in (LLM_DEPLOYMENT, JOB):
        return False
    if kind is POD:
        return True
    generations = [one["metadata"].get("generation") for one in (before, after) if one is not None]
    return len(generations) == 2 and None not in generations and generations[0] == generations[1]


def was_applied(owner: Manifest | None, workload: Manifest | None) -> bool:
    """Was what the spec says planned, and carried out once? By its status, or, before there is one, by its pods' maker.

    The first status is written later than the first pods are made, where others wait for theirs.
    """
    if owner is None:
        return False
    status = owner.get("status") or {}
    if not status.get("conditions"):
        return workload is not None
    planned = find(status["conditions"], PLANNED)
    return status.get("observedGeneration") == owner["metadata"].get("generation") and planned.get("status") == "True"
