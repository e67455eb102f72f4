"""LLMDeployments as the API server would hold them in each state that tools tell apart, made by the operator itself.

Each document is what a real turn of the reconciler wrote on a fake cluster, beside what kstatus and Argo CD should make
of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from millstream_operator.kube.kinds import DEPLOYMENT, LLM_DEPLOYMENT, POD
from tests.support.fake_cluster import FakeCluster, pod_of
from tests.support.fake_operator import FakeOperator, respec, served, world
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class State:
    """One state: how it comes about, and what a tool should call it."""

    make: Callable[[], Awaitable[FakeCluster]]
    kstatus: str
    argo: str
    reason: str = ""  # of Ready


async def document(state: State) -> Manifest:
    """The stored LLMDeployment in that state."""
    cluster = await state.make()
    return cluster.the(LLM_DEPLOYMENT)


async def _unseen() -> FakeCluster:
    return world()


async def _starting() -> FakeCluster:
    operator = FakeOperator(world())
    await operator.turn()
    return operator.cluster


async def _failing(**status: Any) -> FakeOperator:
    operator = FakeOperator(world())
    await operator.turn()
    template = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    operator.cluster.put(pod_of("demo-0", template, ready=False, **status))
    await operator.turn()
    return operator


async def _no_gpu() -> FakeCluster:
    message = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return (await _failing(conditions=[condition])).cluster


async def _crashing() -> FakeCluster:
    ended = {"name": "runtime", "state": {"terminated": {"exitCode": 139}}}
    return (await _failing(containerStatuses=[ended])).cluster


async def _no_weights() -> FakeCluster:
    message = '{"reason": "CheckpointInvalid", "message": "No config.json in /models/x."}'
    ended = {"name": "runtime", "state": {"terminated": {"exitCode": 1, "message": message}}}
    return (await _failing(containerStatuses=[ended])).cluster


async def _quota() -> FakeCluster:
    operator = await _failing()
    conditions = [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: pods"}]
    operator.cluster.set_status(DEPLOYMENT, "demo", {"observedGeneration": 1, "conditions": conditions})
    await operator.turn()
    return operator.cluster


async def _denied() -> FakeCluster:
    operator = await _failing()
    conditions = [
        {"type": "ReplicaFailure", "status": "True", "message": 'violates PodSecurity "restricted:latest": x'}
    ]
    operator.cluster.set_status(DEPLOYMENT, "demo", {"observedGeneration": 1, "conditions": conditions})
    await operator.turn()
    return operator.cluster


async def _deadline() -> FakeCluster:
    operator = await _failing()
    conditions = [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]
    operator.cluster.set_status(DEPLOYMENT, "demo", {"observedGeneration": 1, "conditions": conditions})
    await operator.turn()
    return operator.cluster


async def _ready() -> FakeCluster:
    return (await served()).cluster


async def _changed_and_unseen() -> FakeCluster:
    operator = await served()
    respec(operator.cluster, engine={"maxNumSeqs": 8})
    return operator.cluster


async def _rolling_out() -> FakeCluster:
    operator = await served()
    respec(operator.cluster, engine={"maxNumSeqs": 8})
    await operator.turn()
    return operator.cluster


async def _unanswered() -> FakeCluster:
    operator = FakeOperator(world())
    operator.model.unreachable = "/ready gave no answer within 5 seconds"
    for _ in range(8):
        await operator.turn()
        operator.cluster.roll_out()
    return operator.cluster


async def _refused_while_serving() -> FakeCluster:
    operator = await served()
    respec(operator.cluster, speculation={"method": "EAGLE"})
    await operator.turn()
    return operator.cluster


async def _name_taken() -> FakeCluster:
    cluster = world()
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "demo", "namespace": "team"}}
    cluster.put(service | {"spec": {"ports": [{"port": 1, "protocol": "TCP"}]}})
    await FakeOperator(cluster).turn()
    return cluster


async def _scaled_to_zero() -> FakeCluster:
    operator = FakeOperator(world(manifest(replicas=0)))
    await operator.settle()
    return operator.cluster


async def _being_deleted() -> FakeCluster:
    operator = await served()
    operator.cluster.edit(
        LLM_DEPLOYMENT, "demo", lambda live: live["metadata"].update(deletionTimestamp="2025-01-01T00:00:00Z")
    )
    return operator.cluster


async def _pod_lost() -> FakeCluster:
    operator = await served()
    (pod,) = operator.cluster.all(POD)
    operator.cluster.remove(POD, pod["metadata"]["name"])
    counts = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "availableReplicas": 0}
    operator.cluster.set_status(DEPLOYMENT, "demo", counts)
    await operator.turn()
    return operator.cluster


async def _scaling_up() -> FakeCluster:
    operator = await served()
    respec(operator.cluster, replicas=2)
    await operator.turn()
    return operator.cluster


async def _no_room_for_another() -> FakeCluster:
    operator = await served()
    respec(operator.cluster, replicas=2)
    await operator.turn()
    message = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    template = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    operator.cluster.put(pod_of("demo-1", template, ready=False, conditions=[condition]))
    await operator.turn()
    return operator.cluster


STATES: dict[str, State] = {
    "not seen yet": State(_unseen, "InProgress", "Progressing"),
    "starting": State(_starting, "InProgress", "Progressing", "Starting"),
    "no free GPU": State(_no_gpu, "InProgress", "Progressing", "InsufficientGPU"),
    "crashing": State(_crashing, "InProgress", "Progressing", "RuntimeCrashed"),
    "no weights": State(_no_weights, "Failed", "Degraded", "CheckpointInvalid"),
    "no quota left": State(_quota, "InProgress", "Progressing", "QuotaExceeded"),
    "not admitted": State(_denied, "Failed", "Degraded", "AdmissionDenied"),
    "too late": State(_deadline, "Failed", "Degraded", "ProgressDeadlineExceeded"),
    "ready": State(_ready, "Current", "Healthy", "Ready"),
    "changed, not seen yet": State(_changed_and_unseen, "InProgress", "Progressing", "Ready"),
    "rolling out": State(_rolling_out, "InProgress", "Progressing", "RollingOut"),
    "the model does not answer": State(_unanswered, "InProgress", "Progressing", "ServiceUnreachable"),
    "a newer spec is refused": State(_refused_while_serving, "Failed", "Degraded", "UnsupportedByRuntime"),
    "a name is taken": State(_name_taken, "Failed", "Degraded", "NameConflict"),
    "a pod is lost": State(_pod_lost, "InProgress", "Progressing", "RollingOut"),
    "scaling up": State(_scaling_up, "InProgress", "Progressing", "Ready"),
    "no room for another replica": State(_no_room_for_another, "InProgress", "Progressing", "Ready"),
    "scaled to zero": State(_scaled_to_zero, "Current", "Suspended", "ScaledToZero"),
    "being deleted": State(_being_deleted, "Terminating", "Progressing", "Ready"),
}
