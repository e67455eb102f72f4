"""What keeps an LLMDeployment from being Ready: an ordered list of policies. Pure.

The first policy that finds something decides, from the outside in: what the API server refuses, what the operator took
back, why pods fail, why pods cannot be created, and last what merely takes too long. To add a blocker, write a policy
and give it its place in POLICIES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from millstream_operator.api.status import AppliedStrategy
from millstream_operator.diagnosis.admission import pods_not_created
from millstream_operator.diagnosis.diagnosis import Diagnosis, sentence
from millstream_operator.diagnosis.pod_facts import claims, runtime_status, secrets
from millstream_operator.diagnosis.pod_failures import diagnose
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.diagnosis.scheduling import NO_GPU_NODE
from millstream_operator.rendering.revision_marks import Failure
from millstream_operator.rollout import workload
from millstream_operator.status.observation import Observation
from millstream_operator.status.scaling import NO_ROOM
from millstream_operator.status.warmup import last_phase, stalled

Policy = Callable[[Observation], Diagnosis | None]
# What keeps more replicas from starting, or takes its time, is no failure of those that serve (`scaling`).
NOT_OF_WHAT_SERVES = NO_ROOM | {Reason.PROGRESS_DEADLINE_EXCEEDED}
WAITING_FOR_MOUNTS = ("ContainerCreating", "PodInitializing")


def find_blocker(observation: Observation) -> Diagnosis | None:
    """Return what the first policy finds; None where nothing is blocked."""
    return next((found for policy in POLICIES if (found := policy(observation)) is not None), None)


# Whatever the rollout does


def not_applied(observation: Observation) -> Diagnosis | None:
    """The API server refuses an object, its name is taken, or a volume cannot be mounted."""
    return observation.problem


def rolled_back(observation: Observation) -> Diagnosis | None:
    """The wanted revision failed, and the last good one runs."""
    if observation.rollout is None or (failure := observation.rollout.failure) is None:
        return None
    return Diagnosis(
        Reason.ROLLED_BACK,
        f"Rolled back to revision {observation.running.name}, because revision {observation.revision.name} failed. "
        f"{failure.reason}: {failure.message} {_next_try(failure)}",
    )


def _next_try(failure: Failure) -> str:
    if failure.retry_at is None:
        return "Change the spec, or set spec.rollout.retry to another value, to try again."
    return f"It is tried again at {failure.retry_at}, because the cause lies outside the revision."


# Until the wanted revision is rolled out


def pods_fail(observation: Observation) -> Diagnosis | None:
    """A pod of the wanted revision does not get ready, for a reason that it or its node gives."""
    found = diagnose(observation.own_pods, observation.revision.plan, last_phase(observation))
    blocked = rollout_blocked(observation)
    if found is not None and found.reason is Reason.INSUFFICIENT_GPU and observation.lacks_gpus:
        found = replace(found, hint=NO_GPU_NODE)
    if found is None or blocked is None:
        return found
    return replace(found, hint=f"{found.hint} {blocked.message}".lstrip())


def workload_paused(observation: Observation) -> Diagnosis | None:
    """Somebody paused the object that makes the pods: its controller makes none of another revision."""
    state, owner, kind = observation.state, observation.owner, observation.workloads.kind.kind
    if state is None or state.paused_by is None:
        return None
    by = f" by the field manager {state.paused_by}" if state.paused_by else ""
    return Diagnosis(
        Reason.ROLLOUT_PAUSED,
        f"The {kind} {owner.name} is paused{by} (spec.paused): no pod of revision {observation.revision.name} is made.",
        f"Resume it: kubectl rollout resume {kind.lower()}/{owner.name} -n {owner.metadata.namespace}.",
    )


def rollout_blocked(observation: Observation) -> Diagnosis | None:
    """The rollout waits for room, and drains no pod meanwhile."""
    return observation.rollout.blocked if observation.rollout is not None else None


def pods_refused(observation: Observation) -> Diagnosis | None:
    """The ReplicaSet controller cannot create the pods."""
    message = workload.replica_failure(observation.state, observation.revision.digest)
    found = pods_not_created(message) if message is not None else None
    if found is None or observation.state is None or found.reason is not Reason.QUOTA_EXCEEDED:
        return found
    # The quota may have room by now: the controller tries again only after a while.
    as_of = f", as of {observation.state.failed_at}" if observation.state.failed_at else ""
    return replace(found, detail=f"{found.detail.removesuffix('.')}{as_of}.", hint=_without_a_surge(observation))


def _without_a_surge(observation: Observation) -> str:
    """Return how to replace pods that serve under a quota that has no room for one more."""
    surges = observation.rollout is not None and observation.rollout.strategy is AppliedStrategy.AVAILABILITY
    if not surges or len(observation.pods) == len(observation.own_pods):
        return ""
    return (
        "A rollout that keeps every replica needs room for one pod more: raise the quota, or set rollout.strategy: "
        "ResourceAware, which drains an old pod first."
    )


def deadline_passed(observation: Observation) -> Diagnosis | None:
    """The Deployment controller reports the rollout of the wanted revision as too slow (it continues).

    It sees no bytes: a pod whose download or load advances is not late.
    """
    if not workload.deadline_passed(observation.state, observation.revision.digest):
        return None
    if any(pod["metadata"].get("uid") in observation.advancing for pod in observation.own_pods):
        return None
    return Diagnosis(
        Reason.PROGRESS_DEADLINE_EXCEEDED,
        sentence(f"The rollout made no progress within rollout.progressDeadline. {_missing_mounts(observation)}"),
        workload.DEADLINE_FIX,
    )


def _until_rolled_out(policy: Policy) -> Policy:
    """The policy, silent once every replica runs the wanted revision, and about room for more of what serves."""

    def found(observation: Observation) -> Diagnosis | None:
        if observation.rolled_out or (problem := policy(observation)) is None:
            return None
        return None if observation.is_serving and problem.reason in NOT_OF_WHAT_SERVES else problem

    return found


POLICIES: tuple[Policy, ...] = (
    not_applied,
    rolled_back,
    _until_rolled_out(workload_paused),
    _until_rolled_out(pods_fail),
    _until_rolled_out(pods_refused),
    _until_rolled_out(rollout_blocked),
    _until_rolled_out(stalled),
    _until_rolled_out(deadline_passed),
)


# The words


def _missing_mounts(observation: Observation) -> str:
    """What a pod whose containers are not created waits for: a failing mount is reported in Events alone."""
    for pod in observation.own_pods:
        waiting = runtime_status(pod).get("state", {}).get("waiting", {}).get("reason")
        if waiting in WAITING_FOR_MOUNTS:
            mounts = [f"the PersistentVolumeClaim {name}" for name in claims(pod)]
            mounts += [f"the Secret {name}" for name in secrets(pod)]
            needs = f"; it mounts {' and '.join(mounts)}: check that they exist" if mounts else ""
            return f"The pod waits in {waiting}{needs}"
    return ""
