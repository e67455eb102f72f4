"""Which news cannot wait: a spec that nothing was done about yet, before the progress of what was. Pure.

A thousand LLMDeployments applied at once bring several thousand events of their first pods while most of them have no
children yet. In the order of arrival, each step of the first ones would hold up all of the last ones.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.reconciling.conditions import PLANNED, find
from millstream_operator.reconciling.kinds import JOB, LLM_DEPLOYMENT, POD, Kind

Manifest = dict[str, Any]


def can_wait(kind: Kind, before: Manifest | None, after: Manifest, owner: Manifest | None) -> bool:
    """May a changed object be looked at later? `before`: as it was known; `owner`: the LLMDeployment it concerns.

    Not the LLMDeployment itself, not a child that somebody made or edited, and nothing a plan waits for.
    """
    if kind in (LLM_DEPLOYMENT, JOB) or not brought_about(owner):
        return False
    if kind is POD:
        return True
    generations = [one["metadata"].get("generation") for one in (before, after) if one is not None]
    return len(generations) == 2 and None not in generations and generations[0] == generations[1]


def brought_about(owner: Manifest | None) -> bool:
    """Was what the spec says planned, and carried out once, by what its status says?"""
    if owner is None:
        return False
    status = owner.get("status") or {}
    planned = find(status.get("conditions") or (), PLANNED)
    generation = owner["metadata"].get("generation")
    return status.get("observedGeneration") == generation and planned.get("status") == "True"
