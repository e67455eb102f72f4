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


def ready(observation: Observation, blocker: Diagnosis | None, phase: str | None = None) -> Condition:
    """`blocker` is `find_blocker(observation)`, `phase` where the slowest pod's warm-up is."""

    def no(reason: Reason, message: str) -> Condition:
        return Condition(conditions.READY, False, reason, message)

    if blocker is not None:
        return no(blocker.reason, blocker.message)
    if observation.owner.spec.replicas == 0 and observation.rolled_out:
        return Condition(conditions.READY, True, Reason.SCALED_TO_ZERO, "spec.replicas is 0, so nothing serves.")
    if not observation.rolled_out:
        return _on_its_way(observation, phase)
    if observation.answer is None:
        return no(Reason.ASKING_MODEL, "The pods are available; asking the model through its Service.")
    if observation.answer.failure is not None:
        return no(observation.answer.failure.reason, observation.answer.failure.message)
    return Condition(conditions.READY, True, Reason.READY, f"The model answers at {service_url(observation.owner)}.")


def reconciling_or_stalled(observation: Observation, summary: Condition) -> Condition | None:
    """Whether it goes on by itself or waits for a person; None when there is nothing left to do."""
    if summary.status is True:
        return None
    if summary.reason in NEEDS_A_PERSON:
        return Condition(conditions.STALLED, True, summary.reason, summary.message)
    if (late := deadline_passed(observation)) is not None:
        return Condition(conditions.STALLED, True, late.reason, late.message)
    return Condition(conditions.RECONCILING, True, summary.reason, summary.message)


def find_blocker(observation: Observation) -> Diagnosis | None:
    """The first thing that is in the way, from the outside in."""
    if observation.problem is not None:
        return observation.problem
    if observation.rollout is not None and (failure := observation.rollout.failure) is not None:
        return Diagnosis(
            Reason.ROLLED_BACK,
            f"Rolled back to revision {observation.running.name}, because revision {observation.revision.name} failed. "
            f"{failure.reason}: {failure.message} Change the spec to try again.",
        )
    if observation.rolled_out:
        return None
    if (found := diagnose(observation.own_pods, observation.revision.plan, last_phase(observation))) is not None:
        return _with_a_way_out(observation, found)
    told = workload.replica_failure(observation.workload, observation.revision.digest)
    if told is not None and (found := pods_not_created(told)) is not None:
        return found
    return stalled(observation) or deadline_passed(observation)


def _with_a_way_out(observation: Observation, found: Diagnosis) -> Diagnosis:
    """Who insists on a surge that finds no GPU waits for ever, and may not know of the other way."""
    surges = observation.rollout is not None and observation.rollout.strategy is AppliedStrategy.AVAILABILITY
    older_serve = any(is_ready(pod) and digest_of_pod(pod) != observation.revision.digest for pod in observation.pods)
    if found.reason is not Reason.INSUFFICIENT_GPU or not surges or not older_serve:
        return found
    hint = "Older pods serve on; rollout.strategy ResourceAware would replace them in place."
    return Diagnosis(found.reason, f"{found.message} {hint}")


def deadline_passed(observation: Observation) -> Diagnosis | None:
    """The Deployment controller gave the rollout of the wanted revision up (it still goes on)."""
    if not workload.deadline_passed(observation.workload, observation.revision.digest):
        return None
    return Diagnosis(
        Reason.PROGRESS_DEADLINE_EXCEEDED,
        sentence(f"The rollout made no progress within rollout.progressDeadline. {_what_is_waited_for(observation)}"),
    )


def _what_is_waited_for(observation: Observation) -> str:
    """A pod whose containers are not made does not say why: a mount that fails is told in Events alone."""
    for pod in observation.own_pods:
        waiting = runtime_status(pod).get("state", {}).get("waiting", {}).get("reason")
        if waiting in ("ContainerCreating", "PodInitializing"):
            mounts = [f"the PersistentVolumeClaim {name}" for name in claims(pod)]
            mounts += [f"the Secret {name}" for name in secrets(pod)]
            needs = f"; it mounts {' and '.join(mounts)}: do they exist?" if mounts else ""
            return f"The pod waits in {waiting}{needs}"
    return ""


def _on_its_way(observation: Observation, phase: str | None) -> Condition:
    wanted = observation.owner.spec.replicas
    in_place = observation.rollout is not None and observation.rollout.strategy is AppliedStrategy.RESOURCE_AWARE
    where = f"; the slowest is in phase {phase}" if phase is not None and observation.own_pods else ""
    return Condition(
        conditions.READY,
        False,
        Reason.STARTING if observation.is_first else Reason.ROLLING_OUT,
        f"{observation.updated_and_available} of {wanted} replicas of revision {observation.revision.name} "
        f"available{where}."
        + (" The pods are replaced in place: an old one is drained before its successor starts." if in_place else ""),
    )
