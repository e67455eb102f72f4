"""What one turn of the reconciler observed of an LLMDeployment: everything that its status is made from. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.stored import UnknownField
from millstream_operator.diagnosis.conditions import Condition
from millstream_operator.diagnosis.decisions import Decision
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.pod_facts import is_ready
from millstream_operator.probing.answer import Answer
from millstream_operator.probing.boot_report import PodReport
from millstream_operator.rendering.revision import Revision
from millstream_operator.rollout.rollout import RolloutStep
from millstream_operator.rollout.serving_replicas import serves_while_scaling
from millstream_operator.rollout.workload import digest_of_pod, rolled_out

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that the status is made from. A new field has a default: absent where it was not observed."""

    owner: LLMDeployment
    revision: Revision
    workload: Manifest | None  # the live Deployment
    pods: Sequence[Manifest] = ()
    answer: Answer | None = None  # None: not asked yet, or being asked
    problem: Diagnosis | None = None  # why the objects could not be applied
    previous: Manifest = field(default_factory=dict)  # the status before
    decisions: Sequence[Decision] = ()  # that the journal may lack
    reports: Mapping[str, PodReport] = field(default_factory=dict)  # of pods that warm up, by uid
    rollout: RolloutStep | None = None
    companions: Sequence[Condition] | None = None  # of autoscaler and monitors; None: not observed
    outdated: Diagnosis | None = None  # what a new plan would gain
    advancing: Collection[str] = ()  # uids of pods that download or load, and whose bytes move
    unknown_fields: tuple[UnknownField, ...] = ()  # of the stored spec, which a newer version wrote
    asked_replicas: int | None = None  # spec.replicas, where the budget holds the owner's to fewer

    @property
    def running(self) -> Revision:
        """What the pods shall run: what the spec asks for, or the last good revision after that failed."""
        return self.rollout.running.revision if self.rollout is not None else self.revision

    @property
    def workload_status(self) -> Manifest:
        found: Manifest = (self.workload or {}).get("status", {})
        return found

    @property
    def own_pods(self) -> list[Manifest]:
        """Pods of the wanted revision. Failures of older pods do not count."""
        return [pod for pod in self.pods if digest_of_pod(pod) == self.revision.digest]

    @property
    def updated_and_available(self) -> int:
        """Replicas of the wanted revision that serve."""
        wanted = self.owner.spec.replicas
        return wanted if self.rolled_out else min(sum(is_ready(pod) for pod in self.own_pods), wanted)

    @property
    def rolled_out(self) -> bool:
        return rolled_out(self.owner, self.revision, self.workload)

    @property
    def is_serving(self) -> bool:
        """The wanted revision serves; its number of replicas may still change."""
        return self.serves(self.revision)

    def serves(self, revision: Revision) -> bool:
        """All replicas of the revision are available, or it answered before and some of them are."""
        if rolled_out(self.owner, revision, self.workload):
            return True
        answered = self.previous.get("rollout", {}).get("currentRevision") == revision.name
        return answered and self.owner.spec.replicas > 0 and serves_while_scaling(revision, self.workload, self.pods)

    @property
    def is_rolled_back(self) -> bool:
        """The wanted revision failed, and another one runs in its place."""
        return self.rollout is not None and self.rollout.failure is not None

    @property
    def is_first(self) -> bool:
        """No revision ever answered."""
        return not self.previous.get("rollout", {}).get("currentRevision")
