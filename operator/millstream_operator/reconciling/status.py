"""From what was seen to the status that is written. Pure: the same world gives the same status, at any time.

The parts have files of their own: `observations` the conditions, `warmup` and `memory_report` what the pods tell of
themselves, `decisions` the journal.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.reconciling import conditions
from millstream_operator.reconciling.conditions import Condition
from millstream_operator.reconciling.decisions import journal
from millstream_operator.reconciling.diagnosis import Diagnosis
from millstream_operator.reconciling.memory_report import memory_status
from millstream_operator.reconciling.observations import observed
from millstream_operator.reconciling.readiness import obstacle
from millstream_operator.reconciling.seen import Seen
from millstream_operator.reconciling.warmup import warmup_status
from millstream_operator.rendering.names import selector_string
from millstream_operator.rendering.service import service_url

Manifest = dict[str, Any]


def status_of(seen: Seen, now: str) -> Manifest:
    """The whole status, in the API's form; None in place of a field that has nothing to say. `now` is RFC 3339, UTC."""
    owner, workload = seen.owner, seen.workload_status
    in_the_way = obstacle(seen)
    warmup = warmup_status(seen, in_the_way, now)
    found = observed(seen, in_the_way, (warmup or {}).get("phase"))
    generation = owner.metadata.generation or 0
    ready = found[0].status is True
    current = seen.revision.name if ready else seen.previous.get("rollout", {}).get("currentRevision")
    return {
        "observedGeneration": generation,
        "conditions": conditions.merged(seen.previous.get("conditions", ()), found, generation, now),
        "replicas": workload.get("replicas", 0),
        "readyReplicas": workload.get("readyReplicas", 0),
        "updatedReplicas": workload.get("updatedReplicas", 0),
        "availableReplicas": workload.get("availableReplicas", 0),
        "selector": selector_string(owner.name),
        "url": service_url(owner),
        "model": {"servedName": owner.served_name},
        "plan": seen.revision.plan,
        "memory": memory_status(seen),
        "warmup": warmup,
        "runtime": {"image": seen.revision.image},
        "rollout": ({"currentRevision": current} if current else {}) | {"updateRevision": seen.revision.name},
        "decisions": journal(seen.previous.get("decisions", ()), seen.decisions, now),
    }


def status_of_invalid(
    previous: Manifest, generation: int, problem: Diagnosis, now: str, plan: Manifest | None = None
) -> Manifest:
    """A spec that this version cannot read or run: say so, and leave all else, for the last good state serves on.

    `plan` is what was planned and not applied, for the person who wants to know what it would have been.
    """
    found = [
        Condition(conditions.READY, False, problem.reason, problem.message),
        Condition(conditions.PLANNED, False, problem.reason, problem.message),
        Condition(conditions.STALLED, True, problem.reason, problem.message),
    ]
    kept = [c for c in previous.get("conditions", ()) if c["type"] in (conditions.AVAILABLE, conditions.MODEL_READY)]
    return (
        previous
        | ({"plan": plan} if plan is not None else {})
        | {
            "observedGeneration": generation,
            "conditions": [*conditions.merged(previous.get("conditions", ()), found, generation, now), *kept],
        }
    )
