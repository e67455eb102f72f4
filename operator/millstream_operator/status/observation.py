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
from millstream_operator.diagnosis.pod_facts import digest_of_pod
from millstream_operator.planning.measurement import Measurement
from millstream_operator.probing.answer import Answer
from millstream_operator.probing.boot_report import PodReport
from millstream_operator.probing.drafting_history import Drafting
from millstream_operator.rendering.revision import Revision
from millstream_operator.rollout.rollout import RolloutStep
from millstream_operator.rollout.serving_replicas import serves_while_scaling
from millstream_operator.rollout.workload import rolled_out
from millstream_operator.workloads.deployments import DEPLOYMENTS
from millstream_operator.workloads.replica import Replica
from millstream_operator.workloads.workload import Workload, WorkloadState, state_of

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that the status is made from. A new field has a default: absent where it was not observed."""

    owner: LLMDeployment
    revision: Revision
    workload: Manifest | None  # the live object
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
    lacks_gpus: bool = False  # no node of the cluster offers a GPU, and none is declared
    unknown_fields: tuple[UnknownField, ...] = ()  # of the stored spec, which a newer version wrote
    compared: Measurement | None = None  # what a pod measured, with the predictions for it
    asked_replicas: int | None = None  # spec.replicas, where the budget holds the owner's to fewer
    workloads: Workload = DEPLOYMENTS  # what reads the live object and groups the pods
    drafting: Drafting | None = None  # whether the pods draft, smoothed; None: not known
    draft_tuned: Condition | None = None  # how far the tuning of the draft is; None: none is asked for
    quality: str = ""  # what the quality gate says about the wanted revision

    @property
    def running(self) -> Revision:
        """What the pods shall run: what the spec asks for, or the last good revision after that failed."""
        return self.rollout.running.revision if self.rollout is not None else self.revision

    @property
    def state(self) -> WorkloadState | None:
        return state_of(self.workloads, self.workload)

    @property
    def counts(self) -> Mapping[str, int]:
        """Of replicas, as the live object gives them."""
        return state.counts if (state := self.state) is not None else {}

    @property
    def own_pods(self) -> list[Manifest]:
        """Pods of the wanted revision. Failures of older pods do not count."""
        return [pod for pod in self.pods if digest_of_pod(pod) == self.revision.digest]

    @property
    def own_replicas(self) -> list[Replica]:
        """Replicas of the wanted revision."""
        return [one for one in self.workloads.replicas(self.pods) if one.digest == self.revision.digest]

    @property
    def updated_and_available(self) -> int:
        """Replicas of the wanted revision that serve."""
        wanted = self.owner.spec.replicas
        return wanted if self.rolled_out else min(sum(one.is_ready for one in self.own_replicas), wanted)

    @property
    def rolled_out(self) -> bool:
        return rolled_out(self.owner, self.revision, self.state)

    @property
    def is_serving(self) -> bool:
        """The wanted revision serves; its number of replicas may still change."""
        return self.serves(self.revision)

    def serves(self, revision: Revision) -> bool:
        """All replicas of the revision are available, or it answered before and some of them are."""
        state = self.state
        if rolled_out(self.owner, revision, state):
            return True
        answered = self.previous.get("rollout", {}).get("currentRevision") == revision.name
        if not answered or self.owner.spec.replicas == 0:
            return False
        return serves_while_scaling(revision, state, self.workloads.replicas(self.pods))

    @property
    def has_answered(self) -> bool:
        """The wanted revision serves and answered, whatever else (a refused companion, say) keeps Ready False."""
        if self.owner.spec.replicas == 0 or self.running.digest != self.revision.digest:
            return False
        return self.is_serving and self.answer is not None and self.answer.failure is None

    @property
    def is_rolled_back(self) -> bool:
        """The wanted revision failed, and another one runs in its place."""
        return self.rollout is not None and self.rollout.failure is not None

    @property
    def is_first(self) -> bool:
        """No revision ever answered."""
        return not self.previous.get("rollout", {}).get("currentRevision")
