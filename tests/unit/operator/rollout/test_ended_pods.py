"""An evicted pod's object stays, for weeks at times: it is of no replica, and neither rollouts nor scaling count it."""

from __future__ import annotations

from typing import Any

from millstream_operator.kube.kinds import POD
from tests.support.fake_operator import respec
from tests.support.gpu_nodes import gpu_node, gpu_pod
from tests.support.rollout_world import World, image, served, served_on_nodes

Manifest = dict[str, Any]


def evict(one: World, pod: Manifest) -> None:
    """The kubelet ends the pod for good. Its controller makes another one."""
    status = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    scheduled = {"type": "PodScheduled", "status": "True"}
    ready = {"type": "Ready", "status": "False"}
    one.cluster.set_status(POD, pod["metadata"]["name"], status | {"conditions": [scheduled, ready]})


async def test_an_evicted_pod_of_an_older_revision_makes_scaling_no_incident() -> None:
    one = await served("Availability", replicas=2)
    evict(one, one.controller.pods()[0])
    await one.apply(**image("better"))
    assert one.operator.condition("Ready")["status"] == "True"
    respec(one.cluster, replicas=3)
    await one.operator.turn()
    ready = one.operator.condition("Ready")
    assert (ready["status"], one.operator.condition("Reconciling")["reason"]) == ("True", "Scaling"), ready
    assert one.operator.condition("ModelReady")["status"] == "True"
    await one.settle()
    assert one.operator.status()["availableReplicas"] == 3


async def test_a_rollout_is_put_off_though_its_first_pod_was_evicted() -> None:
    """One node with two GPUs. The new revision wants both; its pod is evicted, and a tenant takes one."""
    rollout = {"strategy": "ResourceAware"}
    one = await served_on_nodes(gpu_node("a", gpus=2), parallelism={"tensor": 1}, rollout=rollout)
    one.controller.failing["good"] = {"phase": "Running"}  # it loads for a while
    respec(one.cluster, parallelism={"tensor": 2})
    for _ in range(20):
        await one.operator.turn()
        one.cluster.run_jobs("{}")
        one.controller.step()
        if (pods := one.controller.pods()) and asked(pods[0]) == 2 and pods[0]["spec"].get("nodeName"):
            break
    evict(one, one.controller.pods()[0])
    one.controller.failing.clear()
    one.cluster.put(gpu_pod("theirs", "a"))
    await one.settle()
    assert [asked(pod) for pod in one.controller.available()] == [1]
    assert one.operator.condition("RolloutBlocked")["reason"] == "GPUsTaken"


def asked(pod: Manifest) -> int:
    return int(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
