"""What one turn works on: the cluster as the index has it, and what each stage has found out.

    reader.read(owner, key) -> ReconcileContext -> stage -> ReconcileContext with that stage's result -> ...

A stage never reads the index for these objects itself. After a stage that writes, the reconciler calls `refresh`,
because the answers to our writes are in the index.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.stored import UnknownField
from millstream_operator.children.children import Children
from millstream_operator.children.companions import CompanionResult
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.facts.restored_status import RestoredStatus, StatusRestorer
from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.kube.kinds import CONTROLLER_REVISION, LLM_DEPLOYMENT, POD
from millstream_operator.planning.inspected import Inspected
from millstream_operator.planning.measurement import Measurement
from millstream_operator.preparation.draft_tuner import NOT_TUNED, DraftState
from millstream_operator.preparation.preparer import NOTHING_PREPARED, Prepared
from millstream_operator.probing.answer import Answer
from millstream_operator.rendering.names import role_of
from millstream_operator.rendering.revision import Revision
from millstream_operator.rollout.pinning import Chosen
from millstream_operator.rollout.rollout import RolloutStep
from millstream_operator.rollout.traffic_shift.staged_shift import Comparison
from millstream_operator.workloads.deployments import DEPLOYMENTS
from millstream_operator.workloads.replica import Replica
from millstream_operator.workloads.workload import Workload, WorkloadState, state_of

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReconcileContext:
    """One LLMDeployment in one turn."""

    # read
    owner: LLMDeployment
    key: OwnerKey
    previous: Manifest  # the status as it was written last
    records: Sequence[Manifest]  # its ControllerRevisions
    workload: Manifest | None  # the live object that makes its pods
    pods: Sequence[Manifest]  # those of its replicas
    workloads: Workload = DEPLOYMENTS  # what reads that object and groups the pods
    unknown_fields: tuple[UnknownField, ...] = ()  # of the stored spec, which a newer version wrote
    other_pods: Sequence[Manifest] = ()  # of Jobs: they mount volumes and ConfigMaps, and are no replicas
    restored: RestoredStatus | None = None  # what an earlier process found out and this one has not yet
    # plan
    inspected: Inspected | None = None
    prepared: Prepared = NOTHING_PREPARED
    draft: DraftState = NOT_TUNED
    chosen: Chosen | None = None
    asked_replicas: int | None = None  # spec.replicas, where the budget holds the owner's to fewer
    # compare the pods of a staged shift
    comparison: Comparison | None = None  # None: there is none, or its pods are not ready
    # decide
    step: RolloutStep | None = None
    advancing: Collection[str] = ()  # uids of pods that download or load, and are not late
    lacks_gpus: bool = False  # no node offers a GPU, and none is declared
    # apply
    wanted: Sequence[Manifest] = ()
    problem: Diagnosis | None = None  # why the objects could not be applied
    replicas_edited: bool = False  # somebody else edited the replicas of the live object
    companions: CompanionResult | None = None  # None: not applied yet
    # probe
    answer: Answer | None = None  # None: not asked, or not certain yet
    # compare
    compared: Measurement | None = None  # what a pod measured, with predictions; None: not measured in this turn

    @property
    def plan(self) -> Chosen:
        """The result of the plan stage. Only later stages may ask."""
        if self.chosen is None:
            raise ValueError("the plan stage has not run")
        return self.chosen

    @property
    def rollout(self) -> RolloutStep:
        """The result of the decide stage. Only later stages may ask."""
        if self.step is None:
            raise ValueError("the decide stage has not run")
        return self.step

    @property
    def running(self) -> Revision:
        """What the pods shall run."""
        return self.rollout.running.revision

    @property
    def state(self) -> WorkloadState | None:
        return state_of(self.workloads, self.workload)

    @property
    def live_digest(self) -> str | None:
        """Of the revision that the live object makes pods of."""
        return state.digest if (state := self.state) is not None else None

    @property
    def replicas(self) -> list[Replica]:
        return self.workloads.replicas(self.pods)

    @property
    def uid(self) -> str:
        return self.owner.metadata.uid or ""


class ContextReader:
    """Reads contexts from the index."""

    def __init__(
        self, index: Index, children: Children, restorer: StatusRestorer, workloads: Workload = DEPLOYMENTS
    ) -> None:
        self._index, self._children, self._restorer, self._workloads = index, children, restorer, workloads

    def read(self, owner: LLMDeployment, key: OwnerKey) -> ReconcileContext:
        """The context at the start of a turn."""
        context = self.refresh(ReconcileContext(owner, key, {}, (), None, (), self._workloads))
        return replace(context, restored=self._restorer.restore(owner, key, context.previous, context.pods))

    def refresh(self, context: ReconcileContext) -> ReconcileContext:
        """The same context with the index of now; what the stages found stays."""
        owner, key = context.owner, context.key
        manifest = self._index.get(LLM_DEPLOYMENT, key.namespace, key.name) or {}
        pods = self._index.children(key, POD)
        return replace(
            context,
            previous=manifest.get("status") or {},
            records=self._children.list_owned(owner, key, CONTROLLER_REVISION),
            workload=self._children.get_owned(owner, key, self._workloads.kind),
            pods=[pod for pod in pods if role_of(pod) in self._workloads.roles],
            other_pods=[pod for pod in pods if role_of(pod) not in self._workloads.roles],
        )
