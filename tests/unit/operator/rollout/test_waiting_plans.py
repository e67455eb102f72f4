"""Plans that wait look again, new plans count while they could start, and adoptions gain enough and take turns."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.kube.kinds import CONTROLLER_REVISION, LLM_DEPLOYMENT, POD
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import FakeOperator, answer_to, world
from tests.support.gpu_nodes import A100, L4, T4, gpu_node, gpu_pod
from tests.support.llmdeployments import manifest
from tests.support.rollout_controller import RolloutController
from tests.support.rollout_world import on_nodes, served_on_nodes

Manifest = dict[str, Any]
FOLLOW = {"runtime": {"updatePolicy": "FollowOperator", "image": "good"}}


async def test_a_plan_that_waits_takes_a_gpu_of_another_product_that_becomes_free() -> None:
    one = on_nodes(gpu_node("a", T4), gpu_node("b", A100), gpu_pod("p", "a"), gpu_pod("q", "b"))
    await one.settle()
    assert one.status["plan"]["summary"] == "1×T4-16GB TP1 BF16"
    assert one.controller.available() == []
    one.cluster.remove(POD, "q")
    await one.settle()
    assert one.status["plan"]["summary"] == "1×A100-80GB TP1 BF16"
    assert one.nodes() == ["b"]
    assert one.decisions == ["PlanAdopted"]
    assert "the plan before never served, and others hold its GPUs" in one.status["decisions"][0]["message"]
    version = one.cluster.version
    one.restart()
    await one.settle()
    assert one.cluster.version == version


async def test_the_gpu_that_was_planned_is_taken_when_it_is_free_first() -> None:
    one = on_nodes(gpu_node("a", T4), gpu_node("b", A100), gpu_pod("p", "a"), gpu_pod("q", "b"))
    await one.settle()
    one.cluster.remove(POD, "p")
    await one.settle()
    assert one.nodes() == ["a"]
    assert len(one.cluster.all(CONTROLLER_REVISION)) == 1


async def test_a_plan_that_serves_is_not_planned_again_when_other_gpus_come() -> None:
    one = await served_on_nodes(gpu_node("a", L4))
    one.cluster.put(gpu_node("b", T4))
    await one.settle()
    assert one.nodes() == ["a"]
    assert one.operator.condition("PlanOutdated")["reason"] == "NewFacts"


async def test_a_new_plan_that_could_not_start_is_no_gain() -> None:
    one = await served_on_nodes(gpu_node("a", L4))
    one.cluster.put(gpu_pod("theirs", "b"))
    one.cluster.put(gpu_node("b", T4))
    await one.settle()
    assert one.operator.condition("PlanOutdated") == {}
    one.cluster.remove(POD, "theirs")
    await one.settle()
    assert one.operator.condition("PlanOutdated")["reason"] == "NewFacts"


@pytest.mark.parametrize(("price", "adopted"), [(0.79, False), (0.71, True)])
async def test_follow_operator_adopts_another_gpu_only_if_it_saves_enough(price: float, adopted: bool) -> None:
    one = await served_on_nodes(gpu_node("a", L4))
    one.cluster.edit(LLM_DEPLOYMENT, "demo", lambda live: live["spec"].update(FOLLOW))
    prices = {"L4-24GB": {"listPriceUSDPerHour": 0.8}, "T4-16GB": {"listPriceUSDPerHour": price}}
    one.operator.facts.use_catalog(load_catalog(prices))
    one.cluster.put(gpu_node("b", T4))
    await one.settle()
    assert one.nodes() == (["b"] if adopted else ["a"])
    if not adopted:
        assert "at least 10 % less" in one.operator.condition("PlanOutdated")["message"]


# The fleet's limit


class Fleet:
    """LLMDeployments that follow the operator, each on the CPU, and their Deployment controller."""

    def __init__(self, number: int) -> None:
        self.names = [f"m{index}" for index in range(number)]
        self.cluster: FakeCluster = world(manifest(runtime={"updatePolicy": "FollowOperator"}))
        first = self.cluster.the(LLM_DEPLOYMENT)
        self.cluster.remove(LLM_DEPLOYMENT, "demo")
        for name in self.names:
            self.cluster.put({**first, "metadata": {"name": name, "namespace": "team"}, "status": {}})
        self.controller = RolloutController(self.cluster)
        self.most = 0

    def under_way(self, image: str) -> int:
        """LLMDeployments of which some pods, and not all, run the image, or none that is ready."""
        found = 0
        for name in self.names:
            pods = self.controller.pods(name)
            new = [pod for pod in pods if pod["spec"]["containers"][0]["image"] == image]
            found += bool(new) and (len(new) < len(pods) or len(self.controller.available(name)) < len(new))
        return found

    async def run(self, operator: FakeOperator, rounds: int, image: str) -> None:
        for _ in range(rounds):
            for name in self.names:
                await operator.turn(name)
                self.controller.step(name)
                self.cluster.run_jobs(answer_to)
                self.cluster.collect_garbage()
                self.most = max(self.most, self.under_way(image))

    def images(self) -> list[str]:
        return [pod["spec"]["containers"][0]["image"] for name in self.names for pod in self.controller.available(name)]


@pytest.mark.parametrize("restarted", [False, True])
async def test_adoptions_take_turns_over_the_fleet_and_all_come_to_an_end(restarted: bool) -> None:
    fleet = Fleet(6)
    await fleet.run(FakeOperator(fleet.cluster, image="good"), 8, "better")
    assert fleet.images() == ["good"] * 6
    operator = FakeOperator(fleet.cluster, image="better")
    await fleet.run(operator, 2, "better")
    assert 0 < fleet.most <= 2
    waits = [name for name in fleet.names if "MILLSTREAM_MAX_ADOPTIONS" in str(operator.status(name)["conditions"])]
    assert waits, "and the others say what they wait for"
    if restarted:
        operator = FakeOperator(fleet.cluster, image="better")
    await fleet.run(operator, 20, "better")
    assert fleet.images() == ["better"] * 6
    assert fleet.most <= 2


async def test_a_deployment_at_zero_replicas_takes_no_turn_of_the_limit() -> None:
    fleet = Fleet(4)
    await fleet.run(FakeOperator(fleet.cluster, image="good"), 8, "better")
    for name in fleet.names[:2]:
        fleet.cluster.edit(LLM_DEPLOYMENT, name, lambda live: live["spec"].update(replicas=0))
    await fleet.run(FakeOperator(fleet.cluster, image="better"), 12, "better")
    assert fleet.images() == ["better"] * 2
