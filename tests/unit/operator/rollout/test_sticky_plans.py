"""A plan is kept whatever happens around it; what a new one would gain is reported; FollowOperator adopts it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.kube.client import ApiUnreachable
from millstream_operator.kube.kinds import CONTROLLER_REVISION, DEPLOYMENT, LLM_DEPLOYMENT, NODE, POD
from millstream_operator.rendering.pod_defaults import PodDefaults
from tests.support.fake_cluster import FakeCluster, Fault, Killed
from tests.support.fake_operator import FakeOperator, answer_to, respec, world
from tests.support.gpu_nodes import A100, L4, T4, gpu_node, gpu_pod, spec_on_gpu
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
FOLLOW = {"runtime": {"updatePolicy": "FollowOperator"}}
STATUS_ONLY = [("apply", "LLMDeployment/status")]


async def served_on(*nodes: Manifest, **spec: Any) -> FakeOperator:
    """Ready on GPUs, with its pods bound to the first of the nodes."""
    cluster = world(manifest(**spec_on_gpu(**spec)))
    for node in nodes:
        cluster.put(node)
    operator = FakeOperator(cluster)
    await operator.settle()
    bind(cluster, nodes[0]["metadata"]["name"])
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    operator.client.requests.clear()
    return operator


def bind(cluster: FakeCluster, node: str) -> None:
    for pod in cluster.all(POD):
        if not pod["spec"].get("nodeName"):
            cluster.edit(POD, pod["metadata"]["name"], lambda live: live["spec"].update(nodeName=node))


def plan_of(operator: FakeOperator) -> Manifest:
    plan: Manifest = operator.cluster.the(LLM_DEPLOYMENT)["status"]["plan"]
    return plan


def template(operator: FakeOperator) -> Manifest:
    found: Manifest = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    return found


# Planned from the cluster


async def test_pods_go_to_the_gpus_that_were_planned_for() -> None:
    operator = await served_on(gpu_node("a", L4))
    assert plan_of(operator)["summary"] == "1×L4-24GB TP1 BF16"
    affinity = template(operator)["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert L4 in term["matchExpressions"][0]["values"]
    assert plan_of(operator)["predicted"]["tokensPerSecond"] > 0


async def test_where_all_gpus_are_taken_the_plan_waits_and_says_so() -> None:
    cluster = world(manifest(**spec_on_gpu()))
    for node in (gpu_node("a", T4), gpu_node("b", A100)):
        cluster.put(node)
    for pod in (gpu_pod("p", "a"), gpu_pod("q", "b")):
        cluster.put(pod)
    operator = FakeOperator(cluster)
    await operator.inspect()
    plan = plan_of(operator)
    assert plan["summary"] == "1×T4-16GB TP1 BF16"
    assert "1 × 1 T4-16GB are wanted and there is room for 0 now" in plan["reasons"][0]["reason"]
    assert operator.condition("Planned")["status"] == "True"


async def test_what_would_not_fit_into_an_empty_cluster_is_refused_until_nodes_come() -> None:
    cluster = world(manifest(**spec_on_gpu(replicas=2)))
    cluster.put(gpu_node("a", T4))
    operator = FakeOperator(cluster)
    await operator.inspect()
    assert operator.condition("Ready")["reason"] == "Infeasible"
    cluster.put(gpu_node("b", T4))
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"


async def test_a_budget_is_refused_by_name_where_gpus_are_not_known_and_kept_where_they_are() -> None:
    cluster = world(manifest(**spec_on_gpu(budget={"maxMonthlyUSD": 1000})))
    operator = FakeOperator(cluster)
    await operator.inspect()
    assert operator.condition("Ready")["reason"] == "UnsupportedByRuntime"
    assert "(inventory)" in operator.condition("Ready")["message"]
    cluster.put(gpu_node("a", L4))
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    assert plan_of(operator)["cost"]["monthlyUSD"] <= 1000


# Kept


async def happens(operator: FakeOperator, what: str) -> None:
    cluster = operator.cluster
    if what == "a better node comes":
        cluster.put(gpu_node("better", T4))
    elif what == "its node goes":
        cluster.remove(NODE, "a", "")
    elif what == "its node is drained":
        cluster.edit(NODE, "a", lambda live: live["spec"].update(unschedulable=True), "")
    elif what == "a pod takes the rest":
        cluster.put(gpu_pod("theirs", "spare"))
    elif what == "another GPU gets cheaper":
        operator.facts.use_catalog(load_catalog({"A100-80GB": {"listPriceUSDPerHour": 0.01}}))
    elif what == "it gets dearer":
        operator.facts.use_catalog(load_catalog({"L4-24GB": {"listPriceUSDPerHour": 0.9}}))


@pytest.mark.parametrize(
    ("what", "gain"),
    [
        ("a better node comes", "1×T4-16GB TP1 BF16 instead of 1×L4-24GB TP1 BF16: $204 a month less."),
        ("another GPU gets cheaper", "1×A100-80GB TP1 BF16 instead of 1×L4-24GB TP1 BF16: $581 a month less."),
        ("its node goes", "1×A100-80GB TP1 BF16 instead of 1×L4-24GB TP1 BF16: $1,917 a month more."),
        ("its node is drained", ""),
        ("a pod takes the rest", ""),
        ("it gets dearer", ""),
    ],
)
async def test_whatever_happens_to_nodes_and_prices_no_deployment_is_written(what: str, gain: str) -> None:
    operator = await served_on(gpu_node("a", L4), gpu_node("spare", A100))
    before = template(operator)
    await happens(operator, what)
    for _ in range(3):
        await operator.turn()
    assert template(operator) == before
    assert operator.writes == (STATUS_ONLY if gain else []), "reported once, or nothing to report"
    assert operator.condition("PlanOutdated").get("reason") == ("NewFacts" if gain else None)
    assert gain in operator.condition("PlanOutdated").get("message", "")
    assert operator.condition("Ready")["status"] == "True"


async def test_a_restarted_operator_says_the_same_and_writes_nothing() -> None:
    operator = await served_on(gpu_node("a", L4))
    operator.cluster.put(gpu_node("b", T4))
    await operator.turn()
    restarted = FakeOperator(operator.cluster)
    await restarted.settle()
    assert restarted.writes == []
    assert restarted.condition("PlanOutdated")["reason"] == "NewFacts"


async def test_what_was_outdated_is_new_again_when_the_world_turns_back() -> None:
    operator = await served_on(gpu_node("a", L4))
    operator.cluster.put(gpu_node("b", T4))
    await operator.turn()
    operator.cluster.remove(NODE, "b", "")
    await operator.turn()
    assert operator.condition("PlanOutdated") == {}
    assert operator.writes == STATUS_ONLY * 2


async def test_the_second_best_is_not_outdated_because_the_best_is_still_there() -> None:
    """The cheapest GPU was taken. That it is there is no news, whatever else comes."""
    cluster = world(manifest(**spec_on_gpu()))
    for node in (gpu_node("a", L4), gpu_node("b", T4)):
        cluster.put(node)
    cluster.put(gpu_pod("theirs", "b"))
    operator = FakeOperator(cluster)
    await operator.settle()
    assert (plan_of(operator)["summary"], plan_of(operator)["preferred"]) == (
        "1×L4-24GB TP1 BF16",
        "1×T4-16GB TP1 BF16",
    )
    cluster.remove(POD, "theirs")
    cluster.put(gpu_node("c", A100))
    await operator.settle()
    assert operator.condition("PlanOutdated") == {}


async def test_less_is_known_is_no_reason() -> None:
    operator = await served_on(gpu_node("a", L4))
    operator.facts.problem = "The operator has no right to read the cluster's nodes and pods: forbidden"
    operator.facts.stamp += 1
    await operator.turn()
    assert operator.writes == []


async def test_the_next_change_of_the_spec_takes_the_new_plan() -> None:
    operator = await served_on(gpu_node("a", L4))
    operator.cluster.put(gpu_node("b", T4))
    await operator.turn()
    respec(operator.cluster, replicas=2)
    await operator.turn()
    assert plan_of(operator)["summary"] == "1×L4-24GB TP1 BF16", "scaling is none"
    respec(operator.cluster, replicas=1, engine={"maxNumSeqs": 8})
    await operator.settle()
    assert plan_of(operator)["summary"] == "1×T4-16GB TP1 BF16"
    assert operator.condition("PlanOutdated") == {}
    assert operator.cluster.the(LLM_DEPLOYMENT)["status"]["decisions"] == [], "the user decided it"


async def test_a_plan_with_other_numbers_is_another_record() -> None:
    """A record cannot be changed: the same pods, planned at other prices, are written down anew."""
    operator = await served_on(gpu_node("a", L4))
    before = template(operator)
    respec(operator.cluster, engine={"maxNumSeqs": 8})
    await operator.settle()
    operator.facts.use_catalog(load_catalog({"L4-24GB": {"listPriceUSDPerHour": 0.9}}))
    respec(operator.cluster, engine=None)
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    assert template(operator) == before
    assert plan_of(operator)["cost"]["hourlyMilliUSD"] == 900


# FollowOperator


async def test_follow_operator_takes_a_better_plan_over_and_writes_it_down() -> None:
    operator = await served_on(gpu_node("a", L4), **FOLLOW)
    operator.cluster.put(gpu_node("b", T4))
    await operator.settle()
    assert plan_of(operator)["summary"] == "1×T4-16GB TP1 BF16"
    assert operator.condition("PlanOutdated") == {}
    (decision,) = operator.cluster.the(LLM_DEPLOYMENT)["status"]["decisions"]
    assert decision["type"] == "PlanAdopted"
    assert "1×L4-24GB TP1 BF16 → 1×T4-16GB TP1 BF16" in decision["message"]
    restarted = FakeOperator(operator.cluster)
    await restarted.settle()
    assert restarted.writes == []


async def test_follow_operator_takes_another_default_image_over() -> None:
    operator = await served_on(gpu_node("a", L4), **FOLLOW)
    newer = FakeOperator(operator.cluster, image="registry.example.com/runtime:2")
    await newer.settle()
    assert template(newer)["spec"]["containers"][0]["image"] == "registry.example.com/runtime:2"
    decisions = operator.cluster.the(LLM_DEPLOYMENT)["status"]["decisions"]
    messages = {decision["type"]: decision["message"] for decision in decisions}
    assert "registry.example.com/runtime:2 instead of registry.example.com/runtime:1" in messages.pop("PlanAdopted")
    assert not messages


async def test_gpus_are_not_given_up_for_a_wait() -> None:
    operator = await served_on(gpu_node("a", L4), **FOLLOW)
    operator.cluster.put(gpu_pod("theirs", "b"))
    operator.cluster.put(gpu_node("b", T4))
    await operator.turn()
    assert plan_of(operator)["summary"] == "1×L4-24GB TP1 BF16"
    assert operator.condition("PlanOutdated") == {}, "it could not start"
    assert [key.name for key in operator.reconciler.pinning.waiting.values()] == ["demo"]
    operator.cluster.remove(POD, "theirs")
    await operator.settle()
    assert plan_of(operator)["summary"] == "1×T4-16GB TP1 BF16"
    assert not operator.reconciler.pinning.waiting


async def test_the_policy_alone_restarts_nothing() -> None:
    operator = await served_on(gpu_node("a", L4))
    before = template(operator)
    respec(operator.cluster, **FOLLOW)
    await operator.settle()
    assert template(operator) == before
    assert len(operator.cluster.all(CONTROLLER_REVISION)) == 1


async def test_a_change_that_reaches_no_pod_of_this_one_is_no_news() -> None:
    own = {"podTemplate": {"spec": {"priorityClassName": "high"}}, "runtime": {"image": "registry.example.com/own:1"}}
    operator = await served_on(gpu_node("a", L4), **own)
    newer = FakeOperator(
        operator.cluster, image="registry.example.com/runtime:2", pods=PodDefaults(priority_class_name="low")
    )
    await newer.settle()
    assert newer.writes == []


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", range(4))
async def test_an_adoption_that_is_cut_short_is_finished_by_the_next_operator(at: int, after: bool) -> None:
    first = await served_on(gpu_node("a", L4), **FOLLOW)
    cluster = first.cluster
    cluster.put(gpu_node("b", T4))
    cut = FakeOperator(cluster, fault=Fault(at, Killed(), after=after))
    with contextlib.suppress(Killed):
        await cut.settle()
    await FakeOperator(cluster).settle()
    operator = FakeOperator(cluster)
    await operator.settle()
    assert operator.writes == []
    assert plan_of(operator)["summary"] == "1×T4-16GB TP1 BF16"
    assert len(cluster.all(CONTROLLER_REVISION)) == 2
    assert [entry["type"] for entry in cluster.the(LLM_DEPLOYMENT)["status"]["decisions"]] == ["PlanAdopted"]


async def test_a_lost_answer_to_the_record_makes_no_second_plan() -> None:
    cluster = world(manifest(**spec_on_gpu()))
    cluster.put(gpu_node("a", L4))
    await FakeOperator(cluster).turn()
    cluster.run_jobs(answer_to)
    # The answer of the inspection, its Job, and then the record of the plan.
    operator = FakeOperator(cluster, fault=Fault(2, ApiUnreachable("lost"), after=False))
    await operator.turn()
    assert operator.client.written[-1].kind == "ControllerRevision"
    cluster.put(gpu_node("b", T4))
    await operator.settle()
    assert plan_of(operator)["summary"] == "1×L4-24GB TP1 BF16"
    assert operator.condition("PlanOutdated")["reason"] == "NewFacts"
