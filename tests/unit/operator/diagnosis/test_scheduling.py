"""Messages as kube-scheduler 1.34 and older ones write them, in words that say what is short and where."""

from __future__ import annotations

import re
from typing import Any

import pytest

from millstream_operator.diagnosis.conditions import Condition, merged
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.diagnosis.scheduling import diagnose_scheduling

PREEMPTION = " preemption: 0/4 nodes are available: 1 No preemption victims found, 3 Preemption is not helpful."


def unscheduled(message: str, reason: str = "Unschedulable", **spec: Any) -> dict[str, Any]:
    resources = {"requests": {"cpu": "2", "memory": "16Gi"}, "limits": {"nvidia.com/gpu": "4"}}
    container = {"name": "runtime", "resources": resources}
    volume = {"name": "model", "persistentVolumeClaim": {"claimName": "weights"}}
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return {
        "metadata": {"name": "demo-1"},
        "spec": {"containers": [container], "volumes": [volume]} | spec,
        "status": {"conditions": [condition]},
    }


# name: (the scheduler's message, reason, our sentence)
SAID: dict[str, tuple[str, Reason, str]] = {
    "GPUs are taken": (
        "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient nvidia.com/gpu." + PREEMPTION,
        Reason.INSUFFICIENT_GPU,
        "No node has 4 free nvidia.com/gpu for the pod. Of 3 nodes: 2 without 4 free nvidia.com/gpu; 1 with a taint "
        "that the pod does not tolerate.",
    ),
    "the older form names the taint": (
        "0/2 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, "
        "1 node(s) had untolerated taint {spot: true}.",
        Reason.UNSCHEDULABLE,
        "No node takes the pod. Of 2 nodes: 1 with the taint node-role.kubernetes.io/control-plane that the pod does "
        "not tolerate; 1 with the taint spot=true that the pod does not tolerate.",
    ),
    "memory, CPU and room": (
        "0/4 nodes are available: 1 Insufficient cpu, 2 Insufficient memory, 1 Too many pods." + PREEMPTION,
        Reason.UNSCHEDULABLE,
        "No node takes the pod. Of 4 nodes: 2 without 16Gi free memory; 1 without 2 free CPU; 1 without room for "
        "another pod.",
    ),
    "what Kubernetes 1.34 says of ResourceClaims, too": (
        "0/1 nodes are available: 1 Insufficient cpu. no new claims to deallocate, preemption: 0/1 nodes are "
        "available: 1 Preemption is not helpful for scheduling.",
        Reason.UNSCHEDULABLE,
        "No node takes the pod. Of 1 nodes: 1 without 2 free CPU.",
    ),
    "cordoned and unknown words": (
        "0/3 nodes are available: 2 node(s) were unschedulable, 1 node(s) had a bad day.",
        Reason.UNSCHEDULABLE,
        "No node takes the pod. Of 3 nodes: 2 cordoned; 1 had a bad day.",
    ),
    "no claim": (
        '0/3 nodes are available: persistentvolumeclaim "weights" not found. preemption: 0/3 nodes are available.',
        Reason.VOLUME_PENDING,
        "The PersistentVolumeClaim weights does not exist in this namespace: create it, or correct the claimName.",
    ),
    "a claim on its way out": (
        '0/3 nodes are available: persistentvolumeclaim "weights" is being deleted. preemption: x',
        Reason.VOLUME_PENDING,
        "The PersistentVolumeClaim weights is being deleted: create another one, or name another claim.",
    ),
    "a claim of a lost volume": (
        '0/3 nodes are available: persistentvolumeclaim "weights" bound to non-existent persistentvolume "pv-1".',
        Reason.VOLUME_PENDING,
        'The PersistentVolumeClaim weights cannot be used: bound to non-existent persistentvolume "pv-1".',
    ),
    "an unbound claim": (
        "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: 0/3 nodes.",
        Reason.VOLUME_PENDING,
        "The PersistentVolumeClaim weights is not bound to a volume; `kubectl describe pvc` says why (no "
        "StorageClass, a provisioner that fails, no volume that fits).",
    ),
    "a volume elsewhere": (
        "0/2 nodes are available: 2 node(s) didn't match PersistentVolume's node affinity.",
        Reason.VOLUME_PENDING,
        "No node can use the pod's volume (weights). Of 2 nodes: 2 out of reach of its volume.",
    ),
    "no nodes at all": (
        "no nodes available to schedule pods",
        Reason.UNSCHEDULABLE,
        "No node takes the pod: no nodes available to schedule pods.",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_the_sentence_says_what_is_short_and_on_how_many_nodes(name: str) -> None:
    message, reason, wanted = SAID[name]
    found = diagnose_scheduling(unscheduled(message))
    assert found is not None
    assert (found.reason, found.message) == (reason, wanted)


def test_the_labels_that_leave_nodes_out_are_named() -> None:
    term = {"matchExpressions": [{"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-L4"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    message = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."
    found = diagnose_scheduling(unscheduled(message, nodeSelector={"disk": "ssd"}, affinity=affinity))
    assert found is not None
    assert "2 that disk=ssd and nvidia.com/gpu.product In (NVIDIA-L4) leaves out" in found.message


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (
            "is being deleted",
            "is being deleted. It stays until the pods that mount it are gone (`kubectl describe pvc "
            "demo-model-cache`: Used By): delete them. The operator makes another one, and fills it.",
        ),
        ("not found", "does not exist yet: the operator makes it."),
    ],
)
def test_a_claim_that_the_operator_makes_is_not_to_be_made_by_its_reader(said: str, wanted: str) -> None:
    pod = unscheduled(f'0/3 nodes are available: persistentvolumeclaim "demo-model-cache" {said}. preemption: x')
    found = diagnose_scheduling(pod | {"metadata": {"labels": {"millstream.dev/deployment": "demo"}}})
    assert found is not None
    assert found.message == f"The PersistentVolumeClaim demo-model-cache of model.cache {wanted}"


def test_counts_that_change_change_no_order_and_so_no_condition() -> None:
    """Nodes come and go under a pod that waits for weeks: none of it may be a write."""

    def message(taints: int, gpus: int) -> str:
        parts = sorted([f"{taints} node(s) had untolerated taint(s)", f"{gpus} Insufficient nvidia.com/gpu"])
        found = diagnose_scheduling(unscheduled(f"0/{taints + gpus} nodes are available: {', '.join(parts)}."))
        assert found is not None
        return found.message

    first = merged([], [Condition("Ready", False, Reason.INSUFFICIENT_GPU, message(1, 2))], 1, "now")
    assert merged(first, [Condition("Ready", False, Reason.INSUFFICIENT_GPU, message(3, 1))], 1, "later") == first
    assert re.sub(r"\d+", "#", message(1, 2)) == re.sub(r"\d+", "#", message(30, 1))


def test_a_scheduler_that_failed_differs_from_one_that_found_nothing() -> None:
    message = 'running PreBind plugin "VolumeBinding": binding volumes: context deadline exceeded'
    found = diagnose_scheduling(unscheduled(message, "SchedulerError"))
    assert found is not None
    assert (found.reason, message in found.message) == (Reason.VOLUME_PENDING, True)
    other = diagnose_scheduling(unscheduled("nominating failed", "SchedulerError"))
    assert other is not None
    assert other.reason is Reason.UNSCHEDULABLE


def test_a_pod_with_a_node_or_a_scheduling_gate_has_no_diagnosis() -> None:
    assert diagnose_scheduling(unscheduled("gated", "SchedulingGated")) is None
    assert diagnose_scheduling({"metadata": {}, "status": {"conditions": []}}) is None
