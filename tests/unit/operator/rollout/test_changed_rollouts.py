"""A rollout that is changed while it is under way: scaled, corrected, out of room. No pod that serves is drained."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import DEPLOYMENT, LLM_DEPLOYMENT
from tests.support.fake_operator import FakeOperator, respec
from tests.support.gpu_nodes import L4, T4, gpu_node, gpu_pod
from tests.support.rollout_controller import ended
from tests.support.rollout_world import World, image, served, served_on_nodes
from tests.unit.operator.rollout.test_retry import REGISTRY_AWAY
from tests.unit.operator.rollout.test_waiting_plans import Fleet

pytestmark = pytest.mark.deep

Manifest = dict[str, Any]


@pytest.mark.parametrize("strategy", ["Auto", "ResourceAware"])
async def test_an_old_pod_that_waits_takes_the_free_gpu_before_a_pod_that_serves_is_drained(strategy: str) -> None:
    one = await served_on_nodes(gpu_node("a"), gpu_node("b"), rollout={"strategy": strategy})
    before = one.restarts()
    (at,) = one.nodes()
    for name in ("a", "b"):
        one.cordon(name)
    await one.apply(**image("better"))
    await one.apply(replicas=2)
    one.cordon("b" if at == "a" else "a", cordoned=False)
    await one.settle()
    assert before.items() <= one.restarts().items(), "its successor could not start: the other GPU is taken"
    assert one.operator.condition("RolloutBlocked")["status"] == "True"
    one.cordon(at, cordoned=False)
    await one.settle()
    assert one.images() == ["better", "better"]
    assert one.controller.fewest_available >= 1


@pytest.mark.parametrize("strategy", ["Auto", "ResourceAware"])
async def test_pods_of_a_broken_edit_do_not_block_its_correction(strategy: str) -> None:
    """One of two pods was replaced by one that cannot start, and the node of the other is cordoned."""
    one = await served_on_nodes(gpu_node("a"), gpu_node("b"), replicas=2, rollout={"strategy": strategy})
    one.controller.failing["mid"] = ended("x", restarts=1)
    await one.apply(**image("mid"))
    (at,) = one.nodes() if strategy == "ResourceAware" else one.nodes()[:1]
    one.cordon(at)
    one.controller.fewest_available = len(one.controller.available())
    await one.apply(**image("better"))
    assert one.controller.fewest_available >= 1
    assert "mid" not in [pod["spec"]["containers"][0]["image"] for pod in one.controller.pods()]


async def test_a_rollout_that_is_faster_than_the_next_turn_ends_as_a_fresh_create() -> None:
    """On a CPU, edited back while a pod of the edit starts: it shall make room, and then no pod needs any."""
    one, fresh = await served(replicas=2), await served(replicas=2)
    await one.apply(replicas=1, **image("better"))
    one.controller.failing["better"] = {}  # the second pod starts
    await one.apply(replicas=2)
    assert one.images() == ["better"]
    respec(one.cluster, **image("good"))
    await one.operator.turn()
    assert rollout_of(one) != rollout_of(fresh), "in place, so that the pod that starts goes first"
    for _ in range(10):
        one.controller.step()
    assert one.images() == ["good", "good"]
    await one.settle()
    assert rollout_of(one) == rollout_of(fresh)


async def test_after_a_pod_of_a_broken_edit_made_room_a_spare_gpu_is_used() -> None:
    """The broken pod goes first. A node was added meanwhile, so no pod that serves is drained before its successor."""
    one = await served_on_nodes(gpu_node("a", gpus=3), replicas=3)
    one.controller.failing["mid"] = ended("x", restarts=1)
    await one.apply(**image("mid"))
    assert one.images() == ["good", "good"]
    respec(one.cluster, **image("better"))
    await one.operator.turn()
    one.controller.step()
    one.cluster.put(gpu_node("b", gpus=2))
    left: list[int] = []
    one.controller.on_drain = lambda pod, workload: left.append(len(one.controller.available()) - 1)
    await one.settle()
    assert left == [3, 3], "one more pod comes up first"
    assert one.images() == ["better"] * 3


def rollout_of(one: World) -> tuple[str, Manifest, int]:
    """How the Deployment moves pods."""
    spec = one.cluster.the(DEPLOYMENT)["spec"]
    return one.status["rollout"]["strategy"], spec["strategy"], spec["progressDeadlineSeconds"]


async def test_a_correction_takes_the_gpu_of_the_pod_that_could_not_start() -> None:
    one = await served_on_nodes(
        gpu_node("t", T4, 2),
        gpu_node("l", L4, 2),
        replicas=2,
        accelerator={"type": "GPU", "products": ["T4-16GB"]},
        rollout={"strategy": "ResourceAware"},
    )
    one.controller.failing["mid"] = REGISTRY_AWAY
    await one.apply(accelerator={"type": "GPU", "products": ["L4-24GB"]}, **image("mid"))
    one.cluster.put(gpu_pod("theirs", "l"))
    one.controller.fewest_available = len(one.controller.available())
    await one.apply(**image("better"))
    assert sorted(one.images()) == ["better", "good"], "the second L4 is somebody else's, so one pod serves on"
    assert one.controller.fewest_available >= 1
    assert one.operator.condition("RolloutBlocked")["status"] == "True"


@pytest.mark.parametrize("strategy", ["Auto", "ResourceAware"])
async def test_a_pod_of_a_broken_edit_makes_room_before_a_pod_that_serves(strategy: str) -> None:
    """One more pod came up and loads and loads: its GPU is enough for the next edit, so nothing else is given up."""
    one = await served_on_nodes(gpu_node("a", gpus=3), replicas=2, rollout={"strategy": "Availability"})
    one.controller.failing["mid"] = {}
    await one.apply(**image("mid"))
    assert len(one.controller.pods()) == 3
    one.controller.fewest_available = 2
    respec(one.cluster, rollout={"strategy": strategy}, **image("better"))
    await one.operator.turn()
    one.controller.step()
    assert one.controller.fewest_available == 2
    assert one.images() == ["good", "good"]
    await one.settle()
    assert one.images() == ["better", "better"]


async def test_a_rollout_that_is_blocked_is_not_stalled_at_the_deadline() -> None:
    one = await served_on_nodes(gpu_node("a"), rollout={"strategy": "Auto", "progressDeadline": "30m"})
    one.cordon("a")
    await one.apply(**image("better"))
    one.controller.let_the_deadline_pass()
    await one.settle()
    assert one.operator.condition("RolloutBlocked")["status"] == "True"
    assert one.operator.condition("Reconciling")["status"] == "True"
    assert one.operator.condition("Stalled") == {}, "it goes on by itself once there is room"


@pytest.mark.parametrize("strategy", ["Auto", "ResourceAware"])
async def test_scaled_down_in_the_middle_the_last_old_pod_serves_until_the_new_one_is_ready(strategy: str) -> None:
    """Two replicas in place, one done and still loading: at one replica no room is needed any more."""
    one = await served_on_nodes(gpu_node("a", gpus=2), replicas=2, rollout={"strategy": strategy})
    one.controller.failing["better"] = {}  # it loads
    await one.apply(**image("better"))
    assert one.images() == ["good"]
    one.controller.fewest_available = 1
    await one.apply(replicas=1)
    assert one.controller.fewest_available == 1
    del one.controller.failing["better"]
    await one.settle()
    assert one.images() == ["better"]
    assert one.controller.fewest_available == 1


async def test_scaled_down_in_the_middle_the_last_pod_is_not_given_up_before_the_wait_for_a_node() -> None:
    """As above, and a tenant took the GPU that was given up: the pod that waits has waited for a moment only."""
    one = await served_on_nodes(gpu_node("a", gpus=2), replicas=2)
    one.scheduler.now = lambda: one.operator.now
    respec(one.cluster, **image("better"))
    for _ in range(20):
        await one.operator.turn()
        if len(one.controller.available()) == 1:
            break
        one.controller.step()
    one.cluster.put(gpu_pod("theirs", "a"))
    one.controller.fewest_available = 1
    await one.apply(replicas=1)
    assert one.controller.fewest_available == 1
    assert one.operator.condition("RolloutBlocked")["reason"] == "WaitingForNode"


@pytest.mark.parametrize(
    "edit",
    [{"rollout": {"progressDeadline": "5m"}}, {"accelerator": {"type": "GPU"}, "parallelism": {"tensor": 8}}],
    ids=["invalid", "infeasible"],
)
async def test_a_spec_that_is_refused_keeps_no_place_in_the_queue_of_adoptions(edit: Manifest) -> None:
    fleet = Fleet(6)
    await fleet.run(FakeOperator(fleet.cluster, image="good"), 8, "better")
    operator = FakeOperator(fleet.cluster, image="better")
    await fleet.run(operator, 1, "better")
    for name in fleet.names[2:4]:
        fleet.cluster.edit(LLM_DEPLOYMENT, name, lambda live: live["spec"].update(edit))
    await fleet.run(operator, 40, "better")
    assert fleet.images().count("better") >= 4
