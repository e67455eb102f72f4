"""From an observation to the status that is written. Pure: the same cluster gives the same status, at any time.

The parts have files of their own: `condition_list` has the conditions, `blocking_policies` what keeps Ready False,
`warmup` and `memory_report` what the pods report, `diagnosis/decisions.py` the journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream_operator.api.status import RolloutPhase
from millstream_operator.diagnosis import conditions
from millstream_operator.diagnosis.conditions import Condition
from millstream_operator.diagnosis.decisions import Decision, journal
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import NEEDS_A_PERSON, Reason
from millstream_operator.planning.scaling_cost import with_scaling_cost
from millstream_operator.rendering.names import selector_string
from millstream_operator.rendering.service import service_url
from millstream_operator.status.blocking_policies import find_blocker
from millstream_operator.status.condition_list import conditions_of
from millstream_operator.status.memory_report import memory_status
from millstream_operator.status.observation import Observation
from millstream_operator.status.serving import serves
from millstream_operator.status.speculation import speculation_status
from millstream_operator.status.step_report import step_times_status
from millstream_operator.status.warmup import warmup_status
from millstream_operator.workloads.workload import WorkloadState

Manifest = dict[str, Any]
REPLICA_COUNTS = ("replicas", "readyReplicas", "updatedReplicas", "availableReplicas")
# Conditions of the pods that stay as they were while the spec is refused: there is no plan to compare the pods with.
KEPT_WHILE_INVALID = (
    conditions.PODS_SCHEDULED,
    conditions.WARMED_UP,
    conditions.MODEL_READY,
    conditions.DRAFT_TUNED,
    conditions.UNAUTHENTICATED,
    conditions.API_KEYS_INVALID,
)


def status_of(observation: Observation, now: str) -> Manifest:
    """Return the whole status in the API's form, None for a field without a value. `now` is RFC 3339, UTC."""
    owner, counts = observation.owner, observation.counts
    blocker = find_blocker(observation)
    warmup = warmup_status(observation, blocker, now)
    found = conditions_of(observation, blocker, (warmup or {}).get("phase"))
    generation = owner.metadata.generation or 0
    speculation, flips = speculation_status(observation, now)
    decisions = (*observation.decisions, *flips)
    return {
        "observedGeneration": generation,
        "conditions": [
            *conditions.merged(observation.previous.get("conditions", ()), found, generation, now),
            *_not_observed(observation.previous, observation.companions),
        ],
        **{count: counts.get(count, 0) for count in REPLICA_COUNTS},
        "selector": selector_string(owner.name),
        "url": service_url(owner),
        "model": _model(observation),
        "plan": with_scaling_cost(observation.revision.plan, owner.spec),
        "memory": memory_status(observation),
        "stepTimes": step_times_status(observation),
        "speculation": speculation,
        "warmup": warmup,
        "runtime": {"image": observation.revision.image},
        "rollout": _rollout(observation),
        "decisions": journal(observation.previous.get("decisions", ()), decisions, now),
    }


def _model(observation: Observation) -> Manifest:
    """The model as the running revision serves it."""
    running = observation.running
    found = {
        "servedName": running.served_name or observation.owner.served_name,
        "resolvedRevision": running.resolved_revision,
        "resolvedDraftRevision": running.resolved_draft_revision,
    }
    return {name: value for name, value in found.items() if value is not None}


def status_of_terminating(previous: Manifest, metadata: Manifest, now: str) -> Manifest:
    """Return the status of an object that is being deleted and waits for finalizers; all else stays."""
    waits = ", ".join(metadata.get("finalizers") or ())
    said = f"It is being deleted{f'; it waits for its finalizers: {waits}' if waits else ''}."
    found = [
        Condition(kind, value, Reason.TERMINATING, said)
        for kind, value in ((conditions.READY, False), (conditions.RECONCILING, True))
    ]
    before, replaced = previous.get("conditions", ()), {conditions.READY, conditions.RECONCILING, conditions.STALLED}
    kept = [one for one in before if one["type"] not in replaced]
    return previous | {"conditions": [*conditions.merged(before, found, metadata.get("generation", 0), now), *kept]}


def status_of_invalid(
    previous: Manifest,
    generation: int,
    problem: Diagnosis,
    now: str,
    plan: Manifest | None = None,
    state: WorkloadState | None = None,
    companions: Sequence[Condition] | None = None,
    *,
    also: Sequence[Condition] = (),
    decisions: Sequence[Decision] = (),
) -> Manifest:
    """Return the status for a spec that cannot be parsed, run, or planned yet; all else stays, as the pods do.

    `plan` is what was planned and not applied, so that a person can see it. `state` is that of the live workload: it is
    still watched, so the replica counts stay correct. `companions` None: they were not observed, so their conditions
    stay. `also`: conditions of the refusal's own; `decisions`: those that the journal may lack.
    """
    live: Mapping[str, int] = state.counts if state is not None else {}
    found = [
        Condition(conditions.READY, False, problem.reason, problem.message),
        Condition(conditions.PLANNED, False, problem.reason, problem.message),
        Condition(
            conditions.STALLED if problem.reason in NEEDS_A_PERSON else conditions.RECONCILING,
            True,
            problem.reason,
            problem.message,
        ),
    ]
    if conditions.find(previous.get("conditions", ()), conditions.AVAILABLE) or live:
        found.append(serves(bool(live.get("availableReplicas"))))
    found += also
    news = {one.type for one in also}
    kept = [c for c in previous.get("conditions", ()) if c["type"] in KEPT_WHILE_INVALID and c["type"] not in news]
    kept += _not_observed(previous, companions)
    found += companions or ()
    return (
        previous
        | ({"plan": plan} if plan is not None else {})
        | ({"decisions": journal(previous.get("decisions", ()), decisions, now)} if decisions else {})
        | {count: live.get(count, 0) for count in REPLICA_COUNTS if count in live or count in previous}
        | {
            "observedGeneration": generation,
            "conditions": [*conditions.merged(previous.get("conditions", ()), found, generation, now), *kept],
        }
    )


def _not_observed(previous: Manifest, companions: Sequence[Condition] | None) -> list[Manifest]:
    """The conditions of the companions, which stay where a turn ends before it observes them."""
    kept = (conditions.AUTOSCALED, conditions.MONITORED, conditions.AUTOSCALER_CONFLICT, conditions.SELECTED_BY_OTHERS)
    return [c for c in previous.get("conditions", ()) if companions is None and c["type"] in kept]


def _rollout(observation: Observation) -> Manifest:
    found: Manifest = {
        "currentRevision": observation.revision.name
        if observation.has_answered
        else observation.previous.get("rollout", {}).get("currentRevision"),
        "updateRevision": observation.revision.name,
        "availableReplicas": observation.updated_and_available,
    }
    if (step := observation.rollout) is not None:
        if step.failure is not None:
            found["currentRevision"] = step.running.revision.name
        is_scaling = observation.is_serving and step.phase is RolloutPhase.PROGRESSING
        phase = RolloutPhase.COMPLETE if is_scaling else step.phase
        found |= {"strategy": step.strategy.value, "phase": phase.value}
        if step.comparison is not None:
            found["evidence"] = step.comparison.progress or None
    return {name: value for name, value in found.items() if value is not None}
