"""Deployments as workloads: a replica is one pod, and all its GPUs are on one node. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.status import AppliedStrategy
from millstream_operator.diagnosis.conditions import find
from millstream_operator.diagnosis.pod_facts import digest_of_pod, has_ended
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.inventory.pod_needs import read_needs
from millstream_operator.inventory.replica_needs import ReplicaNeeds
from millstream_operator.kube.kinds import DEPLOYMENT, Kind
from millstream_operator.rendering.deployment import deployment, held_at, held_of
from millstream_operator.rendering.names import LEADER
from millstream_operator.workloads.replica import Replica
from millstream_operator.workloads.workload import Workload, WorkloadState

Manifest = dict[str, Any]
COUNTS = ("replicas", "readyReplicas", "updatedReplicas", "availableReplicas")


class Deployments:
    """Implements `Workload`."""

    @property
    def kind(self) -> Kind:
        return DEPLOYMENT

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({LEADER})

    def render(
        self, owner: LLMDeployment, template: Manifest, strategy: AppliedStrategy, held: int | None = None
    ) -> Manifest:
        return deployment(owner, template, strategy, held)

    def read(self, live: Manifest) -> WorkloadState:
        status, held = live.get("status", {}), held_at(live)
        conditions = status.get("conditions", ())
        counts = {name: status.get(name, 0) for name in COUNTS} if status else {}
        if held is not None and counts:  # its new pods serve, though the controller does not call them available
            counts["availableReplicas"] = counts["readyReplicas"]
        failure = find(conditions, "ReplicaFailure")
        return WorkloadState(
            digest=digest_of_pod(live["spec"]["template"]),
            wanted=live["spec"].get("replicas"),
            is_observed=status.get("observedGeneration", 0) >= live["metadata"].get("generation", 0),
            counts=counts,
            is_late=find(conditions, "Progressing").get("reason") == Reason.PROGRESS_DEADLINE_EXCEEDED,
            failure=str(failure.get("message", "")) if failure.get("status") == "True" else None,
            failed_at=str(failure.get("lastUpdateTime") or failure.get("lastTransitionTime") or ""),
            held=held,
            held_of=held_of(live) if held is not None else None,
            paused_by=_paused_by(live),
        )

    def to_zero(self) -> Manifest:
        return {"spec": {"replicas": 0}}

    def templates(self, live: Manifest) -> Sequence[Manifest]:
        return (live["spec"]["template"],)

    def replicas(self, pods: Sequence[Manifest]) -> list[Replica]:
        return [Replica((pod,)) for pod in pods if not has_ended(pod)]

    def needs(self, template: Manifest) -> ReplicaNeeds:
        return ReplicaNeeds(read_needs(template))


def _paused_by(live: Manifest) -> str | None:
    if not live["spec"].get("paused"):
        return None
    return next((str(one["manager"]) for one in live["metadata"].get("managedFields") or () if one.get("manager")), "")


DEPLOYMENTS: Workload = Deployments()
