"""Priority in the queue: a spec that was not applied yet goes before the progress of those that were. Pure.

A thousand LLMDeployments applied at once cause several thousand events of their first pods while most of them have no
children yet. In the order of arrival, each step of the first ones would delay all of the last ones.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.diagnosis.conditions import PLANNED, find
from millstream_operator.kube.kinds import JOB, LLM_DEPLOYMENT, POD, Kind

Manifest = dict[str, Any]


def can_wait(kind: Kind, before: Manifest | None, after: Manifest) -> bool:
    """Return whether a change is only progress, which may wait. `before`: the object as it was known.

    A change of the LLMDeployment, a child that was created or edited, and a Job that a plan waits for may not wait.
    """
    if kind in (LLM_DEPLOYMENT, JOB):
        return False
    if kind is POD:
        return True
    generations = [one["metadata"].get("generation") for one in (before, after) if one is not None]
    return len(generations) == 2 and None not in generations and generations[0] == generations[1]


def was_applied(owner: Manifest | None, workload: Manifest | None) -> bool:
    """Return whether the current spec was planned and applied: by its status, or before that by its Deployment.

    While others wait for their first pods, the first status is written later than the first Deployment.
    """
    if owner is None:
        return False
    status = owner.get("status") or {}
    if not status.get("conditions"):
        return workload is not None
    planned = find(status["conditions"], PLANNED)
    return status.get("observedGeneration") == owner["metadata"].get("generation") and planned.get("status") == "True"
