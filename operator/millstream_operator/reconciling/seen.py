"""What one turn of the reconciler has seen of an LLMDeployment: everything that its status is made from. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.reconciling.boot_report import BootReport, PodReport
from millstream_operator.reconciling.decisions import Decision
from millstream_operator.reconciling.diagnosis import Diagnosis
from millstream_operator.rendering.names import REVISION_LABEL
from millstream_operator.rendering.revision import Revision

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of asking the model through its Service. None in `failure`: it answered."""

    failure: Diagnosis | None = None
    boot: BootReport | None = None  # of the pod that answered


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything that the status is made from. A new fact has a default, so that it is absent where nobody looked."""

    owner: LLMDeployment
    revision: Revision
    workload: Manifest | None  # the live Deployment
    pods: Sequence[Manifest] = ()
    answer: Answer | None = None  # None: not asked yet, or being asked
    problem: Diagnosis | None = None  # why the objects could not be applied
    previous: Manifest = field(default_factory=dict)  # the status before
    decisions: Sequence[Decision] = ()  # made in this turn
    reports: Mapping[str, PodReport] = field(default_factory=dict)  # of pods that warm up, by uid

    @property
    def workload_status(self) -> Manifest:
        found: Manifest = (self.workload or {}).get("status", {})
        return found

    @property
    def own_pods(self) -> list[Manifest]:
        """Pods of the wanted revision; those of an older one may fail as they like."""
        digest = self.revision.digest
        return [pod for pod in self.pods if pod["metadata"].get("labels", {}).get(REVISION_LABEL) == digest]

    @property
    def rolled_out(self) -> bool:
        return rolled_out(self.owner, self.revision, self.workload)

    @property
    def is_first(self) -> bool:
        """No revision ever answered."""
        return not self.previous.get("rollout", {}).get("currentRevision")


def rolled_out(owner: LLMDeployment, revision: Revision, workload: Manifest | None) -> bool:
    """All replicas run the wanted revision and are available, and no older one is left."""
    if workload is None or revision_of(workload) != revision.digest:
        return False
    status, wanted = workload.get("status", {}), owner.spec.replicas
    return bool(
        workload["spec"].get("replicas") == wanted
        and status.get("observedGeneration", 0) >= workload["metadata"]["generation"]
        and status.get("updatedReplicas", 0) == wanted
        and status.get("replicas", 0) == wanted
        and status.get("availableReplicas", 0) == wanted
    )


def revision_of(workload: Manifest) -> str | None:
    """The digest of the revision that a Deployment's template runs."""
    metadata = workload["spec"]["template"].get("metadata", {})
    found: str | None = metadata.get("labels", {}).get(REVISION_LABEL)
    return found
