"""Ready, the summary, and what is in its way. Pure.

    Ready = the pods of the wanted revision, all of them, are available, nothing else runs,
            and the model answered through its Service; or none is wanted, and none is there

A Deployment of zero replicas is Available, too: what waits for Ready (kstatus in Flux and Helm, kubectl, Argo CD) waits
until the cluster is as the spec says, and must not hang on a model that was sent to sleep. Whether something answers is
told by ModelReady and Available.

While it is False, `Reconciling` or `Stalled` says whether it gets there by itself; kstatus wants never both.
"""

from __future__ import annotations

from millstream_operator.api.status import AppliedStrategy
from millstream_operator.diagnosis import conditions
from millstream_operator.diagnosis.admission import pods_not_created
from millstream_operator.diagnosis.conditions import Condition
from millstream_operator.diagnosis.diagnosis import Diagnosis, sentence
from millstream_operator.diagnosis.pod_facts import claims, is_ready, runtime_status, secrets
from millstream_operator.diagnosis.pod_failures import diagnose
from millstream_operator.diagnosis.reasons import NEEDS_A_PERSON, Reason
from millstream_operator.rendering.service import service_url
from millstream_operator.rollout import workload
from millstream_operator.rollout.workload import digest_of_pod
from millstream_operator.status.observation import Observation
from millstream_operator.status.warmup import last_phase, stalled


def ready(seen: Observation, blocker: Diagnosis | None, phase: str | None = None) -> Condition:
    """`blocker` is `find_blocker(seen)`, `phase` where the slowest pod's warm-up is."""

    def no(reason: Reason, message: str) -> Condition:
        return Condition(conditions.READY, False, reason, message)

    if blocker is not None:
        return no(blocker.reason, blocker.message)
    if seen.owner.spec.replicas == 0 and seen.rolled_out:
        return Condition(conditions.READY, True, Reason.SCALED_TO_ZERO, "spec.replicas is 0, so nothing serves.")
    if not seen.rolled_out:
        return _on_its_way(seen, phase)
    if seen.answer is None:
        return no(Reason.ASKING_MODEL, "The pods are available; asking the model through its Service.")
    if seen.answer.failure is not None:
        return no(seen.answer.failure.reason, seen.answer.failure.message)
    return Condition(conditions.READY, True, Reason.READY, f"The model answers at {service_url(seen.owner)}.")


def reconciling_or_stalled(seen: Observation, summary: Condition) -> Condition | None:
    """Whether it goes on by itself or waits for a person; None when there is nothing left to do."""
    if summary.status is True:
        return None
    if summary.reason in NEEDS_A_PERSON:
        return Condition(conditions.STALLED, True, summary.reason, summary.message)
    if (late := deadline_passed(seen)) is not None:
        return Condition(conditions.STALLED, True, late.reason, late.message)
    return Condition(conditions.RECONCILING, True, summary.reason, summary.message)


def find_blocker(seen: Observation) -> Diagnosis | None:
    """The first thing that is in the way, from the outside in."""
    if seen.problem is not None:
        return seen.problem
    if seen.intent is not None and (failure := seen.intent.failure) is not None:
        return Diagnosis(
            Reason.ROLLED_BACK,
            f"Rolled back to revision {seen.running.name}, because revision {seen.revision.name} failed. "
            f"{failure.reason}: {failure.message} Change the spec to try again.",
        )
    if seen.rolled_out:
        return None
    if (found := diagnose(seen.own_pods, seen.revision.plan, last_phase(seen))) is not None:
        return _with_a_way_out(seen, found)
    told = workload.replica_failure(seen.workload, seen.revision.digest)
    if told is not None and (found := pods_not_created(told)) is not None:
        return found
    return stalled(seen) or deadline_passed(seen)


def _with_a_way_out(seen: Observation, found: Diagnosis) -> Diagnosis:
    """Who insists on a surge that finds no GPU waits for ever, and may not know of the other way."""
    surges = seen.intent is not None and seen.intent.strategy is AppliedStrategy.AVAILABILITY
    older_serve = any(is_ready(pod) and digest_of_pod(pod) != seen.revision.digest for pod in seen.pods)
    if found.reason is not Reason.INSUFFICIENT_GPU or not surges or not older_serve:
        return found
    hint = "Older pods serve on; rollout.strategy ResourceAware would replace them in place."
    return Diagnosis(found.reason, f"{found.message} {hint}")


def deadline_passed(seen: Observation) -> Diagnosis | None:
    """The Deployment controller gave the rollout of the wanted revision up (it still goes on)."""
    if not workload.deadline_passed(seen.workload, seen.revision.digest):
        return None
    return Diagnosis(
        Reason.PROGRESS_DEADLINE_EXCEEDED,
        sentence(f"The rollout made no progress within rollout.progressDeadline. {_what_is_waited_for(seen)}"),
    )


def _what_is_waited_for(seen: Observation) -> str:
    """A pod whose containers are not made does not say why: a mount that fails is told in Events alone."""
    for pod in seen.own_pods:
        waiting = runtime_status(pod).get("state", {}).get("waiting", {}).get("reason")
        if waiting in ("ContainerCreating", "PodInitializing"):
            mounts = [f"the PersistentVolumeClaim {name}" for name in claims(pod)]
            mounts += [f"the Secret {name}" for name in secrets(pod)]
            needs = f"; it mounts {' and '.join(mounts)}: do they exist?" if mounts else ""
            return f"The pod waits in {waiting}{needs}"
    return ""


def _on_its_way(seen: Observation, phase: str | None) -> Condition:
    wanted = seen.owner.spec.replicas
    in_place = seen.intent is not None and seen.intent.strategy is AppliedStrategy.RESOURCE_AWARE
    where = f"; the slowest is in phase {phase}" if phase is not None and seen.own_pods else ""
    return Condition(
        conditions.READY,
        False,
        Reason.STARTING if seen.is_first else Reason.ROLLING_OUT,
        f"{seen.updated_and_available} of {wanted} replicas of revision {seen.revision.name} available{where}."
        + (" The pods are replaced in place: an old one is drained before its successor starts." if in_place else ""),
    )
