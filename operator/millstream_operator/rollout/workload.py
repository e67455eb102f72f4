"""What the state of a workload says about the rollout of a revision. Pure."""

from __future__ import annotations

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.rendering.revision import Revision
from millstream_operator.workloads.workload import WorkloadState

DEADLINE_FIX = "If its pods only need longer, raise rollout.progressDeadline and warmup.timeout."


def rolled_out(owner: LLMDeployment, revision: Revision, state: WorkloadState | None) -> bool:
    """All replicas run the revision and are available, and no older one is left."""
    if state is None or state.digest != revision.digest:
        return False
    wanted = owner.spec.replicas
    return bool(
        state.wanted == wanted
        and state.is_observed
        and state.counts.get("updatedReplicas", 0) == wanted
        and state.counts.get("replicas", 0) == wanted
        and state.counts.get("availableReplicas", 0) == wanted
    )


def deadline_passed(state: WorkloadState | None, digest: str) -> bool:
    """The rollout of this revision made no progress within `rollout.progressDeadline`."""
    return state is not None and _is_about(state, digest) and state.is_late


def replica_failure(state: WorkloadState | None, digest: str) -> str | None:
    """Why the pods of this revision cannot be created, in the words of Kubernetes."""
    return state.failure if state is not None and _is_about(state, digest) else None


def _is_about(state: WorkloadState, digest: str) -> bool:
    """Whether what it says is about the rollout of this revision."""
    return state.digest == digest and state.is_observed
