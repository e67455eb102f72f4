"""What the status of a live Deployment says about its rollout. Pure."""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.diagnosis.conditions import find
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.rendering.names import REVISION_LABEL
from millstream_operator.rendering.revision import Revision

Manifest = dict[str, Any]


def digest_of(workload: Manifest) -> str | None:
    """The digest of the revision that its pod template belongs to."""
    metadata = workload["spec"]["template"].get("metadata", {})
    found: str | None = metadata.get("labels", {}).get(REVISION_LABEL)
    return found


def digest_of_pod(pod: Manifest) -> str | None:
    found: str | None = pod["metadata"].get("labels", {}).get(REVISION_LABEL)
    return found


def rolled_out(owner: LLMDeployment, revision: Revision, workload: Manifest | None) -> bool:
    """All replicas run the revision and are available, and no older one is left."""
    if workload is None or digest_of(workload) != revision.digest:
        return False
    status, wanted = workload.get("status", {}), owner.spec.replicas
    return bool(
        workload["spec"].get("replicas") == wanted
        and _is_observed(workload)
        and status.get("updatedReplicas", 0) == wanted
        and status.get("replicas", 0) == wanted
        and status.get("availableReplicas", 0) == wanted
    )


def deadline_passed(workload: Manifest | None, digest: str) -> bool:
    """The rollout of this revision made no progress within `rollout.progressDeadline`."""
    if workload is None or digest_of(workload) != digest or not _is_observed(workload):
        return False  # it is about another rollout
    progressing = find(workload.get("status", {}).get("conditions", ()), "Progressing")
    return bool(progressing.get("reason") == Reason.PROGRESS_DEADLINE_EXCEEDED)


def replica_failure(workload: Manifest | None, digest: str) -> str | None:
    """Why the pods of this revision cannot be created, in the words of Kubernetes."""
    if workload is None or digest_of(workload) != digest or not _is_observed(workload):
        return None
    failure = find(workload.get("status", {}).get("conditions", ()), "ReplicaFailure")
    return str(failure.get("message", "")) if failure.get("status") == "True" else None


def _is_observed(workload: Manifest) -> bool:
    return bool(workload.get("status", {}).get("observedGeneration", 0) >= workload["metadata"]["generation"])
