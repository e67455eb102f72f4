"""A second kind of workload, for tests alone: a replica is a group of two pods, each on a node of its choice.

It proves that what runs replicas assumes neither one pod nor one node per replica. Its object resembles a
LeaderWorkerSet, and the counts in its status have names of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.status import AppliedStrategy
from millstream_operator.diagnosis.pod_facts import digest_of_pod, has_ended
from millstream_operator.inventory.pod_needs import read_needs
from millstream_operator.inventory.replica_needs import ReplicaNeeds
from millstream_operator.kube.kinds import Kind
from millstream_operator.rendering.names import LEADER, ROLE_LABEL, child
from millstream_operator.workloads.deployments import DEPLOYMENTS
from millstream_operator.workloads.replica import Replica
from millstream_operator.workloads.workload import Workload, WorkloadState
from tests.support.fake_cluster import pod_of

Manifest = dict[str, Any]
WORKER, GROUP_LABEL, SIZE = "worker", "groups.example.com/group", 2
COUNTS = {
    "replicas": "groups",
    "readyReplicas": "readyGroups",
    "updatedReplicas": "updatedGroups",
    "availableReplicas": "readyGroups",
}


class PodGroups:
    """Implements `Workload`."""

    kind = Kind("groups.example.com", "v1", "PodGroupSet", "podgroupsets")
    roles = frozenset({LEADER, WORKER})

    def render(
        self, owner: LLMDeployment, template: Manifest, strategy: AppliedStrategy, held: int | None = None
    ) -> Manifest:
        surge = 1 if strategy is AppliedStrategy.AVAILABILITY else 0
        spec = {"groups": owner.spec.replicas, "size": SIZE, "surgeGroups": surge, "podTemplate": template}
        spec |= {"updatedGroups": held} if held is not None else {}
        return child(owner, self.kind.api_version, self.kind.kind) | {"spec": spec}

    def read(self, live: Manifest) -> WorkloadState:
        status = live.get("status") or {}
        return WorkloadState(
            digest=digest_of_pod(live["spec"]["podTemplate"]),
            wanted=live["spec"]["groups"],
            is_observed=status.get("observedGeneration", 0) >= live["metadata"]["generation"],
            counts={name: status.get(theirs, 0) for name, theirs in COUNTS.items()} if status else {},
            is_late=bool(status.get("late")),
            failure=status.get("failure"),
            held=live["spec"].get("updatedGroups"),
        )

    def to_zero(self) -> Manifest:
        return {"spec": {"groups": 0}}

    def templates(self, live: Manifest) -> Sequence[Manifest]:
        return (live["spec"]["podTemplate"],)

    def replicas(self, pods: Sequence[Manifest]) -> list[Replica]:
        groups: dict[str, list[Manifest]] = {}
        for pod in sorted(
            (one for one in pods if not has_ended(one)), key=lambda one: one["metadata"]["labels"][ROLE_LABEL] != LEADER
        ):
            groups.setdefault(pod["metadata"]["labels"][GROUP_LABEL], []).append(pod)
        return [Replica(tuple(members), SIZE) for members in groups.values()]

    def needs(self, template: Manifest) -> ReplicaNeeds:
        return ReplicaNeeds(read_needs(template), SIZE)


class WorkloadKit:
    """Live objects and pods of one kind of workload, as its controller would make them."""

    def __init__(self, workloads: Workload, size: int) -> None:
        self.workloads, self.size = workloads, size

    def replica(self, name: str, template: Manifest, *nodes: str, ready: bool = True) -> list[Manifest]:
        """The pods of one replica, the leader last. One node for each pod; a pod without one waits for GPUs."""
        pods = []
        for number in range(self.size):
            pod = copy.deepcopy(pod_of(f"{name}-{number}", template, ready=ready))
            pod["metadata"]["uid"] = f"uid-{name}-{number}"
            pod["metadata"]["labels"] |= {GROUP_LABEL: name, ROLE_LABEL: WORKER if number else LEADER}
            if number < len(nodes):
                pod["spec"]["nodeName"] = nodes[number]
            else:
                pod["status"]["conditions"] = [NO_GPU]
            pods.append(pod)
        return pods[::-1]

    def live(self, owner: LLMDeployment, template: Manifest, available: int, updated: int | None = None) -> Manifest:
        """The object once its controller has seen it."""
        live = self.workloads.render(owner, template, AppliedStrategy.AVAILABILITY)
        live["metadata"] |= {"generation": 1, "uid": "uid-of-the-workload", "resourceVersion": "1"}
        exist = max(available, updated or 0)
        counts = {
            "replicas": exist,
            "readyReplicas": available,
            "updatedReplicas": available if updated is None else updated,
            "availableReplicas": available,
        }
        if self.workloads is not DEPLOYMENTS:
            counts = {COUNTS[name]: count for name, count in counts.items()}
        return live | {"status": {"observedGeneration": 1} | counts}


NO_GPU = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
    "lastTransitionTime": "2025-01-01T00:00:00Z",
}
KITS = {"a Deployment of single pods": WorkloadKit(DEPLOYMENTS, 1), "groups of two pods": WorkloadKit(PodGroups(), 2)}
