"""A rollout that was put off because its GPUs were taken goes on once it can, and never waits for its own pods."""

from __future__ import annotations

import pytest

from millstream_operator.kube.kinds import LLM_DEPLOYMENT, POD
from tests.support.gpu_nodes import L4, gpu_node
from tests.support.rollout_world import World, taken_after_the_drain
from tests.support.scheduler import NodePool

MAY_DRAIN = pytest.mark.parametrize("strategy", ["Auto", "ResourceAware"])


async def put_off(strategy: str = "ResourceAware") -> World:
    """One node with two GPUs. The new revision wants both, and a tenant takes one after the old pod was drained."""
    one = await taken_after_the_drain()
    await one.settle()
    assert one.operator.condition("RolloutBlocked")["reason"] == "GPUsTaken"
    assert gpus(one) == [1]
    if strategy != "ResourceAware":
        await one.apply(rollout={"strategy": strategy})
    return one


def gpus(one: World) -> list[int]:
    """GPUs of each pod that serves."""
    specs = [pod["spec"]["containers"][0]["resources"]["limits"] for pod in one.controller.available()]
    return [int(limits["nvidia.com/gpu"]) for limits in specs]


@MAY_DRAIN
@pytest.mark.parametrize("restarted", [False, True])
async def test_it_goes_on_where_its_own_pod_holds_the_rest_of_the_room(strategy: str, *, restarted: bool) -> None:
    """The tenant leaves: one GPU is free, the other one is held by the pod that was put back."""
    one = await put_off(strategy)
    one.cluster.remove(POD, "theirs")
    if restarted:
        one.restart()
    await one.settle()
    assert gpus(one) == [2]
    assert one.operator.condition("Ready")["status"] == "True"
    assert one.operator.condition("RolloutBlocked") == {}


async def test_what_is_awaited_is_said_and_nothing_is_written_meanwhile() -> None:
    one = await put_off()
    message = one.operator.condition("RolloutBlocked")["message"]
    assert "wait" in message
    assert "2 × " in message
    version = one.cluster.version
    one.restart()
    await one.settle()
    assert (one.cluster.version, gpus(one)) == (version, [1])


@pytest.mark.parametrize("strategy", ["Auto", "Availability"])
async def test_after_an_edit_of_the_strategy_a_pod_waits_so_that_an_autoscaler_sees_it(strategy: str) -> None:
    one = await put_off()
    one.scheduler.pools = (NodePool("more", L4, gpus=2),)
    one.controller.fewest_available = 1
    await one.apply(rollout={"strategy": strategy})
    assert gpus(one) == [2]
    assert one.nodes() == ["more-0"]
    assert one.controller.fewest_available == 1


async def test_availability_drains_nothing_for_a_rollout_that_was_put_off() -> None:
    one = await put_off("Availability")
    one.controller.fewest_available = 1
    one.cluster.remove(POD, "theirs")
    await one.settle()
    assert gpus(one) == [1]
    assert one.controller.fewest_available == 1
    assert one.operator.condition("RolloutBlocked")["reason"] == "WaitingForNode"
    one.cluster.put(gpu_node("b", gpus=2))
    await one.settle()
    assert gpus(one) == [2]


@MAY_DRAIN
async def test_at_zero_replicas_nothing_waits(strategy: str) -> None:
    one = await put_off(strategy)
    await one.apply(replicas=0)
    assert one.operator.condition("RolloutBlocked") == {}
    ready = one.operator.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("True", "ScaledToZero")
    one.cluster.remove(POD, "theirs")
    await one.apply(replicas=1)
    assert gpus(one) == [2]
    assert one.operator.condition("Ready")["status"] == "True"


async def test_a_pod_that_was_put_back_and_fails_is_given_up() -> None:
    """Its node lost its GPUs' driver, say: what holds the room does not serve."""
    one = await put_off()
    (pod,) = one.controller.available()
    crashed = {"exitCode": 1, "message": "no driver"}
    status = {
        **pod["status"],
        "conditions": [{"type": "Ready", "status": "False"}, {"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [{"name": "runtime", "restartCount": 3, "lastState": {"terminated": crashed}}],
    }
    one.cluster.set_status(POD, pod["metadata"]["name"], status)
    one.cluster.remove(POD, "theirs")
    await one.settle()
    assert gpus(one) == [2]


async def test_scaled_up_while_it_is_put_off() -> None:
    """The second pod of the old revision has no GPU either: the first one serves on, and all is done with room."""
    one = await put_off()
    await one.apply(replicas=2)
    assert gpus(one) == [1]
    one.cluster.remove(POD, "theirs")
    one.cluster.put(gpu_node("b", gpus=2))
    await one.settle()
    assert gpus(one) == [2, 2]
    assert one.cluster.the(LLM_DEPLOYMENT)["status"]["rollout"]["phase"] == "Complete"
