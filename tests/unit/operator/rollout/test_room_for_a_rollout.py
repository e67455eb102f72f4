"""No pod that serves is drained for one that could not start: other GPUs, cordoned nodes, other tenants, lost room."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.inventory.node_pools import read_node_pools
from millstream_operator.kube.kinds import DEPLOYMENT, LLM_DEPLOYMENT, NODE, POD
from tests.support.fake_operator import FakeOperator, respec
from tests.support.gpu_nodes import A100, A100_40, L4, T4, gpu_node, gpu_pod
from tests.support.rollout_world import World, image, served, served_on_nodes, taken_after_the_drain
from tests.support.scheduler import NodePool

Manifest = dict[str, Any]
STRATEGIES = pytest.mark.parametrize("strategy", ["Auto", "ResourceAware", "Availability"])
MAY_DRAIN = pytest.mark.parametrize("strategy", ["Auto", "ResourceAware"])


def blocked(one: World) -> Manifest:
    return one.operator.condition("RolloutBlocked")


async def assert_serves_on(one: World, before: dict[str, str]) -> None:
    assert before.items() <= one.restarts().items()
    assert one.controller.fewest_available >= len(before)
    assert one.images() == ["good"] * len(before)
    assert one.operator.condition("Available")["status"] == "True"
    assert blocked(one)["status"] == "True"
    assert one.status["rollout"]["phase"] == "Blocked"
    assert one.operator.condition("Ready")["status"] == "False"
    version = one.cluster.version
    one.restart()
    await one.settle()
    assert one.cluster.version == version, "and it is stable, after a restart of the operator too"


@MAY_DRAIN
async def test_another_gpu_that_others_hold_is_waited_for(strategy: str) -> None:
    one = await served_on_nodes(
        gpu_node("small", A100_40),
        gpu_node("large", A100),
        gpu_pod("theirs", "large"),
        accelerator={"type": "GPU", "products": ["A100-40GB"]},
        rollout={"strategy": strategy},
    )
    before = one.restarts()
    await one.apply(accelerator={"type": "GPU", "products": ["A100-80GB"]})
    await assert_serves_on(one, before)
    message = blocked(one)["message"]
    assert blocked(one)["reason"] == "NoRoom"
    assert f"wait for 1 × A100-SXM4-80GB or {A100}" in message
    assert "node small (NVIDIA-A100-SXM4-40GB) is not one that the new pods may use" in message
    one.cluster.remove(POD, "theirs")
    await one.settle()
    assert one.nodes() == ["large"]
    assert blocked(one) == {}
    assert one.operator.condition("Ready")["status"] == "True"


@MAY_DRAIN
async def test_on_a_cordoned_node_an_edit_drains_nothing(strategy: str) -> None:
    one = await served_on_nodes(gpu_node("a"), rollout={"strategy": strategy})
    before = one.restarts()
    one.cordon("a")
    await one.apply(rollout={"strategy": strategy, "drainTimeout": "5m"})
    await assert_serves_on(one, before)
    assert "node a takes no pods now (cordoned)" in blocked(one)["message"]
    one.cordon("a", cordoned=False)
    await one.settle()
    assert one.operator.condition("Ready")["status"] == "True"
    assert one.controller.pods()[0]["spec"]["terminationGracePeriodSeconds"] == 330


@MAY_DRAIN
async def test_more_gpus_on_one_node_than_its_pod_gives_up(strategy: str) -> None:
    one = await served_on_nodes(
        gpu_node("a", gpus=4),
        gpu_pod("theirs", "a", gpus=2),
        parallelism={"tensor": 2},
        rollout={"strategy": strategy},
    )
    before = one.restarts()
    await one.apply(parallelism={"tensor": 4})
    await assert_serves_on(one, before)
    assert "node a would have 2 free, and 4 are needed" in blocked(one)["message"]
    one.cluster.remove(POD, "theirs")
    await one.settle()
    assert one.operator.condition("Ready")["status"] == "True", "2 free and 2 given up"


async def test_an_autoscaler_is_waited_for_before_the_only_pod_is_drained() -> None:
    one = await served_on_nodes(gpu_node("a"), pools=[NodePool("l4", L4)])
    one.scheduler.now = lambda: one.operator.now
    await one.apply(**image("better"))
    assert one.images() == ["better"]
    assert one.nodes() == ["l4-0"]
    assert one.controller.fewest_available == 1
    assert one.decisions == []


async def test_the_only_pod_serves_until_the_wait_for_a_node_ends() -> None:
    one = await served_on_nodes(gpu_node("a"))
    one.scheduler.now = lambda: one.operator.now
    await one.apply(**image("better"))
    assert one.images() == ["good"]
    assert blocked(one)["reason"] == "WaitingForNode"
    assert "until 2025-01-01T00:10:00Z, then the pod that serves is replaced in place" in blocked(one)["message"]
    one.operator.now = "2025-01-01T00:09:59Z"
    await one.settle()
    assert one.images() == ["good"]
    one.operator.now = "2025-01-01T00:10:00Z"
    await one.settle()
    assert one.images() == ["better"]
    assert one.decisions == ["ReplacingInPlace"]
    assert blocked(one) == {}


async def test_a_declared_node_pool_that_can_grow_is_waited_for_however_long() -> None:
    one = await served_on_nodes(gpu_node("a"))
    pool = read_node_pools('[{"product": "L4-24GB", "gpusPerNode": 1, "maxNodes": 2}]')
    one.operator = FakeOperator(one.cluster, node_pools=pool)
    await one.apply(**image("better"))
    assert one.images() == ["good"]
    assert blocked(one)["reason"] == "WaitingForNode"
    assert "then the pod that serves is replaced" not in blocked(one)["message"]
    one.cluster.put(gpu_node("b"))
    await one.settle()
    assert one.nodes() == ["b"]
    assert one.controller.fewest_available == 1


async def test_resource_aware_does_not_wait_where_there_is_room_in_place() -> None:
    one = await served_on_nodes(gpu_node("a"), rollout={"strategy": "ResourceAware"})
    one.scheduler.now = lambda: one.operator.now
    await one.apply(**image("better"))
    assert one.images() == ["better"]


async def test_resource_aware_makes_no_pod_before_there_is_room() -> None:
    """A second pod would start a node, or hang on a ReadWriteOnce volume: who insists on it wants neither."""
    one = await served_on_nodes(gpu_node("a"), pools=[NodePool("a100", A100)], rollout={"strategy": "ResourceAware"})
    before = one.restarts()
    await one.apply(accelerator={"type": "GPU", "products": ["A100-80GB"]})
    assert one.restarts() == before
    assert len(one.cluster.all(NODE)) == 1


async def test_replicas_are_replaced_only_while_each_of_them_would_make_room() -> None:
    one = await served_on_nodes(gpu_node("a", gpus=2), gpu_node("b"), replicas=3)
    one.cordon("b")
    before = one.restarts()
    await one.apply(**image("better"))
    await assert_serves_on(one, before)
    one.cordon("b", cordoned=False)
    await one.settle()
    assert one.images() == ["better"] * 3
    assert one.controller.fewest_available == 2


async def test_a_node_that_is_cordoned_in_the_middle_stops_the_next_drain() -> None:
    one = await served_on_nodes(gpu_node("a"), gpu_node("b"), replicas=2)
    respec(one.cluster, **image("better"))
    await one.operator.turn()
    one.controller.step()
    (left,) = one.controller.available()
    one.cordon(left["spec"]["nodeName"])
    await one.settle()
    assert sorted(one.images()) == ["better", "good"]
    assert blocked(one)["reason"] == "NoRoom"


async def test_gpus_that_another_deployment_was_promised_are_no_room() -> None:
    """Its pod waits for exactly such a GPU, and would take the one that is given up."""
    one = await served_on_nodes(gpu_node("a"), rollout={"strategy": "ResourceAware"})
    other = one.cluster.the(LLM_DEPLOYMENT)
    other = {**other, "metadata": {"name": "other", "namespace": "team"}, "status": {}}
    one.cluster.put(other)
    await one.settle()
    before = one.restarts()
    await one.apply(**image("better"))
    assert one.restarts() == before
    assert "another LLMDeployment waits for the GPUs of node a" in blocked(one)["message"]


@pytest.mark.parametrize("restarted", [False, True])
async def test_where_the_room_is_taken_after_the_drain_the_last_good_one_is_put_back(restarted: bool) -> None:
    one = await taken_after_the_drain()
    if restarted:
        one.restart()
    await one.settle()
    assert one.images() == ["good"]
    assert blocked(one)["reason"] == "GPUsTaken"
    assert "was put back" in blocked(one)["message"]
    assert one.decisions[:2] == ["PutOff", "ReplacingInPlace"]
    before = one.restarts()
    one.restart()
    await one.settle()
    assert one.restarts() == before, "and not drained again for it"
    one.cluster.put(gpu_node("b", gpus=2))
    await one.settle()
    assert one.nodes() == ["b"]
    assert one.operator.condition("Ready")["status"] == "True"


async def test_a_rollback_drains_nothing_that_serves_for_a_pod_that_cannot_start() -> None:
    """Two of three pods run the new revision when it turns out to fail, and the old GPUs are gone."""
    one = await served_on_nodes(
        gpu_node("a", T4, gpus=1),
        gpu_node("b", L4, gpus=2),
        replicas=2,
        rollout={"strategy": "ResourceAware"},
        accelerator={"type": "GPU", "products": ["T4-16GB", "L4-24GB"]},
    )
    before = one.images()
    one.cordon("a")
    one.cordon("b")
    await one.apply(**image("bad"))
    assert one.images() == before


async def test_a_cpu_pod_on_a_cordoned_node_is_not_drained() -> None:
    one = await served("ResourceAware")
    cpu_node = gpu_node("cpu")
    cpu_node["status"]["allocatable"] = {"cpu": "8"}
    one.cluster.put(cpu_node)
    (pod,) = one.controller.pods()
    one.cluster.edit(POD, pod["metadata"]["name"], lambda live: live["spec"].update(nodeName="cpu"))
    one.cordon("cpu")
    await one.apply(**image("better"))
    assert one.images() == ["good"]
    assert "node cpu takes no pods now (cordoned)" in blocked(one)["message"]
    one.cordon("cpu", cordoned=False)
    await one.settle()
    assert one.images() == ["better"]


async def test_a_blocked_rollout_is_not_given_up_at_its_deadline() -> None:
    one = await served_on_nodes(gpu_node("a"))
    one.cordon("a")
    await one.apply(**image("better"))
    one.controller.let_the_deadline_pass()
    await one.settle()
    assert blocked(one)["reason"] == "NoRoom"
    one.cordon("a", cordoned=False)
    await one.settle()
    assert one.images() == ["better"]
    assert "RolledBack" not in one.decisions


async def test_the_old_spec_ends_the_wait_and_restarts_nothing() -> None:
    one = await served_on_nodes(gpu_node("a"))
    one.cordon("a")
    before = one.restarts()
    await one.apply(**image("better"))
    await one.apply(**image("good"))
    assert one.restarts() == before
    assert blocked(one) == {}
    assert one.operator.condition("Ready")["status"] == "True"


async def test_zero_replicas_and_back_replaces_in_any_case() -> None:
    one = await served_on_nodes(gpu_node("a"), rollout={"strategy": "ResourceAware"})
    one.cordon("a")
    await one.apply(**image("better"))
    assert one.images() == ["good"]
    await one.apply(replicas=0)
    assert one.images() == []
    assert one.cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]["containers"][0]["image"] == "better"


@MAY_DRAIN
async def test_more_memory_than_the_old_pod_gives_up_is_not_taken_for_granted(strategy: str) -> None:
    """Nodes' memory is not counted, so the scheduler's word is needed: it misses nothing but the GPU."""
    one = await served_on_nodes(gpu_node("a"), rollout={"strategy": strategy})
    one.scheduler.also_short = "Insufficient memory"
    before = one.restarts()
    resources = {"requests": {"memory": "64Gi"}, "limits": {"memory": "64Gi"}}
    await one.apply(podTemplate={"spec": {"containers": [{"name": "runtime", "resources": resources}]}})
    await assert_serves_on(one, before)
    assert "The new pods ask for more memory than the pods that serve" in blocked(one)["message"]
    one.scheduler.also_short = ""
    await one.settle()
    assert one.operator.condition("Ready")["status"] == "True"
    assert blocked(one) == {}
