"""status.speculation: whether the pods draft, and measured acceptance beside the plan's expectation. Pure.

Written when the smoothed state changes (`probing/drafting_history.py`), with one entry in the journal, or when the
measured acceptance moves by ten points. Pods whose drafter failed are named as soon as they are found. What an earlier
process of the operator wrote stands until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millstream_operator.api.status import DraftingState
from millstream_operator.diagnosis.decisions import Decision, DecisionType
from millstream_operator.diagnosis.pod_facts import is_ready, is_terminating, parse_time
from millstream_operator.probing.drafting_history import Drafting
from millstream_operator.rendering.revision import Revision
from millstream_operator.status.observation import Observation

Manifest = dict[str, Any]
DRAFTING, NOT_DRAFTING = DraftingState.DRAFTING.value, DraftingState.NOT_DRAFTING.value


@dataclass(frozen=True, slots=True)
class KnownDrafting:
    """What the status says of a revision, and for how long."""

    drafting: Drafting
    seconds: float


def speculates(revision: Revision) -> bool:
    """Whether pods of the revision propose tokens."""
    return bool((revision.boot or {}).get("speculation_method", "Disabled") != "Disabled")


def governed(observation: Observation) -> list[Manifest]:
    """The pods to ask for what their drafts gain: those that serve with speculation, by the running revision."""
    if not speculates(observation.running):
        return []
    replicas = observation.workloads.replicas(observation.pods)
    first = [one.pods[0] for one in replicas if one.digest == observation.running.digest]
    return [pod for pod in first if is_ready(pod) and not is_terminating(pod)]


def known_drafting(previous: Mapping[str, Any], revision: Revision, now: str) -> KnownDrafting | None:
    """Read the status that was written before; None where it has nothing of this revision. `now` is RFC 3339, UTC."""
    found = previous.get("speculation") or {}
    if found.get("revision") != revision.name:
        return None
    since, at = parse_time(found.get("lastTransitionTime")), parse_time(now)
    seconds = max(0.0, (at - since).total_seconds()) if since is not None and at is not None else 0.0
    drafting = Drafting(
        found.get("state") == DRAFTING, found.get("acceptedPercent"), failed_pods=tuple(found.get("failedPods") or ())
    )
    return KnownDrafting(drafting, seconds)


def speculation_status(observation: Observation, now: str) -> tuple[Manifest | None, tuple[Decision, ...]]:
    """Return status.speculation, and the decisions that the journal may lack."""
    running = observation.running
    if not speculates(running):
        return None, ()
    known, drafting = known_drafting(observation.previous, running, now), observation.drafting
    if drafting is None:
        return observation.previous["speculation"] if known is not None else None, ()
    was_drafting = known.drafting.is_drafting if known is not None else True  # the plan says so
    has_changed = drafting.is_drafting != was_drafting
    before = observation.previous.get("speculation") or {}
    since = now if known is None or has_changed else before.get("lastTransitionTime", now)
    plan = running.plan.get("speculation") or {}
    status = {
        "revision": running.name,
        "state": DRAFTING if drafting.is_drafting else NOT_DRAFTING,
        "lastTransitionTime": since,
        "acceptedPercent": drafting.accepted_percent,
        "assumedAcceptancePercent": plan.get("assumedAcceptancePercent"),
        "mostSpeedupPercent": plan.get("mostSpeedupPercent"),
        "failedPods": [*drafting.failed_pods] or None,
    }
    decisions: list[Decision] = []
    if {*drafting.failed_pods} - {*(known.drafting.failed_pods if known is not None else ())}:
        decisions.append(Decision(DecisionType.DRAFTER_FAILED, _failure(drafting, plan, running)))
    if has_changed:
        decisions.append(Decision(DecisionType.SPECULATION_CHANGED, _sentence(drafting, plan, running)))
    return {name: value for name, value in status.items() if value is not None}, tuple(decisions)


def _failure(drafting: Drafting, plan: Mapping[str, Any], running: Revision) -> str:
    pods = ", ".join(drafting.failed_pods)
    return (
        f"Revision {running.name} with {plan.get('method', 'speculation')}: the drafter raised an error or gave NaN in "
        f"{pods}. It is not asked again there until the pod is started anew; answers stay right. "
        "drafter_failed in the pod's log has the error."
    )


def _sentence(drafting: Drafting, plan: Mapping[str, Any], running: Revision) -> str:
    measured, assumed = drafting.accepted_percent, plan.get("assumedAcceptancePercent")
    accepted = f"{measured} % of the drafts that were checked stood" if measured is not None else "few were checked"
    figures = f"{accepted}; the plan assumes {assumed} %" if assumed is not None else accepted
    who = f"Revision {running.name} with {plan.get('method', 'speculation')}"
    if drafting.is_drafting:
        return f"{who} drafts again in most decodes: {figures}."
    if drafting.has_failed:
        return f"{who} drafts no more: the drafter failed, and the pods' logs have drafter_failed. {figures}."
    return f"{who} drafts in few decodes now, since a check costs more than it gains: {figures}."
