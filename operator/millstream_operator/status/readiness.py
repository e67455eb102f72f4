"""Ready, the summary, and Reconciling or Stalled. Pure. `blocking_policies` finds what keeps Ready False.

    Ready = the pods of the wanted revision, all of them, are available, nothing else runs,
            and the model answered through its Service; or none is wanted, and none is there

Once a revision was Ready, scaling it is no incident: Ready stays True while a replica of it is available, none fails
and the model answers. Reconciling shows the progress, ReplicasBlocked what keeps new replicas from starting.

Ready is True at zero replicas, too: what waits for Ready (kstatus in Flux and Helm, kubectl, Argo CD) waits until the
cluster matches the spec, and must not hang on a model that is scaled to zero. ModelReady and Available say whether
something answers.

While the cluster is not as the spec says, Reconciling or Stalled says whether it gets there without a person. kstatus
requires that they are never both present.
"""

from __future__ import annotations

from millstream_operator.api.status import AppliedStrategy
from millstream_operator.diagnosis import conditions
from millstream_operator.diagnosis.conditions import Condition
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import NEEDS_A_PERSON, Reason
from millstream_operator.rendering.kueue import is_gated_by_kueue
from millstream_operator.rendering.service import service_url
from millstream_operator.status.blocking_policies import deadline_passed
from millstream_operator.status.observation import Observation
from millstream_operator.status.scaling import replica_count, replicas_blocked


def ready(observation: Observation, blocker: Diagnosis | None, phase: str | None = None) -> Condition:
    """Return the summary. `blocker` is `find_blocker(observation)`, `phase` the warm-up phase of the slowest pod."""

    def no(reason: Reason, message: str) -> Condition:
        return Condition(conditions.READY, False, reason, message)

    if blocker is not None:
        return no(blocker.reason, blocker.message)
    if observation.owner.spec.replicas == 0 and observation.rolled_out:
        return Condition(conditions.READY, True, Reason.SCALED_TO_ZERO, "spec.replicas is 0, so nothing serves.")
    if not observation.is_serving:
        return _in_progress(observation, phase)
    if observation.answer is None:
        return no(Reason.ASKING_MODEL, "The pods are available; asking the model through its Service.")
    if observation.answer.failure is not None:
        return no(observation.answer.failure.reason, observation.answer.failure.message)
    return Condition(conditions.READY, True, Reason.READY, f"The model answers at {service_url(observation.owner)}.")


def reconciling_or_stalled(observation: Observation, summary: Condition) -> Condition | None:
    """Return Stalled where a person must act, else Reconciling; None when the cluster is as the spec says."""
    if summary.status is True:
        return None if observation.rolled_out else _scaling(observation)
    failure = observation.rollout.failure if observation.rollout is not None else None
    is_tried_again = failure is not None and failure.retry_at is not None and summary.reason is Reason.ROLLED_BACK
    if summary.reason in NEEDS_A_PERSON and not is_tried_again:
        return Condition(conditions.STALLED, True, summary.reason, summary.message)
    is_blocked = observation.rollout is not None and observation.rollout.blocked is not None
    waits = is_blocked or any(map(is_gated_by_kueue, observation.own_pods))  # for room or quota: not late
    if not waits and (late := deadline_passed(observation)) is not None:
        return Condition(conditions.STALLED, True, late.reason, late.message)
    return Condition(conditions.RECONCILING, True, summary.reason, summary.message)


def _scaling(observation: Observation) -> Condition:
    blocked = replicas_blocked(observation)
    if blocked is not None and blocked.reason in NEEDS_A_PERSON:
        return Condition(conditions.STALLED, True, blocked.reason, blocked.message)
    return Condition(conditions.RECONCILING, True, Reason.SCALING, replica_count(observation))


def _in_progress(observation: Observation, phase: str | None) -> Condition:
    wanted = observation.owner.spec.replicas
    in_place = observation.rollout is not None and observation.rollout.strategy is AppliedStrategy.RESOURCE_AWARE
    if wanted == 0:
        reason = Reason.STARTING if observation.is_first else Reason.ROLLING_OUT
        return Condition(conditions.READY, False, reason, "spec.replicas is 0: waiting until no pod is left.")
    where = f"; the slowest is in phase {phase}" if phase is not None and observation.own_pods else ""
    return Condition(
        conditions.READY,
        False,
        Reason.STARTING if observation.is_first else Reason.ROLLING_OUT,
        f"{observation.updated_and_available} of {wanted} replicas of revision {observation.revision.name} "
        f"are available{where}."
        + _stage_in_words(observation)
        + (" The pods are replaced in place: an old one is drained before its successor starts." if in_place else ""),
    )


def _stage_in_words(observation: Observation) -> str:
    shift = observation.rollout.shift if observation.rollout is not None else None
    if shift is None:
        return ""
    return f" The traffic shifts in stages, and its pods are compared with the old ones: {shift}."
