"""Budgets hold after `kubectl scale`, and a load that needs more replicas is said: in a simulated GPU cluster."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import CONTROLLER_REVISION, DEPLOYMENT, HORIZONTAL_POD_AUTOSCALER, LLM_DEPLOYMENT
from millstream_operator.rendering.deployment import BUDGETED_ANNOTATION
from millstream_operator.rollout.pruning import HISTORY_LIMIT
from tests.support.fake_operator import FakeOperator, respec, world
from tests.support.gpu_nodes import L4, gpu_node, spec_on_gpu
from tests.support.llmdeployments import manifest

# One L4 costs 0.8048 $ an hour: 588 $ a month.
TWO_L4 = {"maxMonthlyUSD": 1200}


async def serving(nodes: int = 8, **spec: Any) -> FakeOperator:
    """An operator whose model serves on nodes with four L4 each."""
    cluster = world(manifest(**spec_on_gpu(**spec)))
    for number in range(nodes):
        cluster.put(gpu_node(f"gpu-{number}", L4, 4))
    operator = FakeOperator(cluster)
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True", operator.status()
    return operator


async def scale(operator: FakeOperator, replicas: int) -> None:
    """`kubectl scale`: the subresource changes this one field."""
    respec(operator.cluster, replicas=replicas)
    await operator.settle()


def replicas(operator: FakeOperator) -> int:
    found: int = operator.cluster.the(DEPLOYMENT)["spec"]["replicas"]
    return found


def cost(operator: FakeOperator) -> int:
    found: int = operator.status()["plan"]["cost"]["monthlyUSD"]
    return found


async def test_the_cost_follows_kubectl_scale_and_nothing_restarts() -> None:
    operator = await serving()
    before = operator.status()["rollout"]["updateRevision"]
    assert cost(operator) == 588
    await scale(operator, 3)
    assert (replicas(operator), operator.status()["plan"]["replicas"], cost(operator)) == (3, 3, 1763)
    assert operator.status()["rollout"]["updateRevision"] == before
    await scale(operator, 0)
    assert (replicas(operator), cost(operator)) == (0, 0)


async def test_replicas_do_not_grow_beyond_an_enforced_budget() -> None:
    operator = await serving(budget=TWO_L4)
    await scale(operator, 10)
    assert (replicas(operator), cost(operator)) == (2, 1175)
    exceeded = operator.condition("BudgetExceeded")
    assert (exceeded["status"], exceeded["reason"]) == ("True", "BudgetExceeded")
    assert exceeded["message"] == (
        "10 replicas cost $5,876 a month, and budget.maxMonthlyUSD $1,200 pays for 2: 2 run, and no more are added. "
        "Scale down (kubectl scale llmd demo -n team --replicas=2), or raise the budget."
    )
    assert operator.condition("Ready")["status"] == "True"
    assert operator.cluster.the(LLM_DEPLOYMENT)["spec"]["replicas"] == 10, "the spec is the user's"
    await scale(operator, 2)
    assert operator.condition("BudgetExceeded") == {}


async def test_a_restarted_operator_holds_the_same_replicas_and_writes_nothing() -> None:
    operator = await serving(budget=TWO_L4)
    await scale(operator, 10)
    again = FakeOperator(operator.cluster)
    await again.settle()
    assert again.writes == []
    assert replicas(again) == 2


async def test_edits_of_the_budget_do_not_pile_up_revisions() -> None:
    operator = await serving(budget=TWO_L4)
    for number in range(2 * HISTORY_LIMIT):
        respec(operator.cluster, budget={"maxMonthlyUSD": 2000 + number})
        await operator.settle()
        assert operator.condition("Ready")["status"] == "True"
    assert len(operator.cluster.all(CONTROLLER_REVISION)) == HISTORY_LIMIT


async def test_an_observed_budget_only_reports() -> None:
    operator = await serving(budget={**TWO_L4, "enforcement": "Observe"})
    await scale(operator, 3)
    assert (replicas(operator), cost(operator)) == (3, 1763)
    assert operator.condition("BudgetExceeded")["message"] == (
        "3 replicas cost $1,763 a month, and budget.maxMonthlyUSD $1,200 pays for 2. budget.enforcement is Observe, so "
        "this is only reported."
    )


async def test_pods_that_run_are_not_stopped_for_a_smaller_budget() -> None:
    """The new spec is refused, and what runs stays as it is: it neither shrinks nor grows."""
    operator = await serving(replicas=3)
    respec(operator.cluster, budget=TWO_L4)
    await operator.settle()
    ready = operator.condition("Ready")
    assert (ready["status"], ready["reason"], replicas(operator)) == ("False", "BudgetExceeded", 3)
    assert "--type merge -p" in ready["message"]
    await scale(operator, 9)
    assert replicas(operator) == 3
    await scale(operator, 2)
    assert (replicas(operator), operator.condition("Ready")["status"]) == (2, "True"), "two are within the budget"


@pytest.mark.parametrize("load", [{}, {"workload": {"requestsPerMinute": 1}}])
async def test_a_new_spec_beyond_the_budget_gets_no_pods(load: dict[str, Any]) -> None:
    cluster = world(manifest(**spec_on_gpu(replicas=9, budget=TWO_L4, **load)))
    cluster.put(gpu_node("gpu", L4, 16))
    operator = FakeOperator(cluster)
    await operator.settle()
    assert operator.condition("Ready")["reason"] == "BudgetExceeded"
    assert cluster.get(DEPLOYMENT, "demo") is None
    assert {"field": "replicas", "value": "2"}.items() <= operator.status()["plan"]["fixes"][0].items()


async def test_an_autoscaler_beyond_the_budget_is_bounded_and_a_condition_says_so() -> None:
    operator = await serving(budget=TWO_L4, autoscaling={"maxReplicas": 8})
    assert operator.cluster.the(HORIZONTAL_POD_AUTOSCALER)["spec"]["maxReplicas"] == 2
    found = operator.condition("BudgetExceeded")
    assert (found["status"], found["reason"]) == ("True", "BudgetExceeded")
    assert "set maxReplicas to 2 or less" in found["message"]
    assert found["message"].endswith("Until then the autoscaler's maximum is 2.")
    await scale(operator, 2)  # the autoscaler, through /scale of the LLMDeployment
    assert replicas(operator) == 2


def scale_the_child(operator: FakeOperator, replicas: int) -> None:
    """`kubectl scale deployment`, past the LLMDeployment."""
    operator.cluster.edit(DEPLOYMENT, "demo", lambda live: live["spec"].update(replicas=replicas))


@pytest.mark.parametrize("asked", [1, 2, 10])
async def test_who_scales_the_deployment_itself_does_not_lift_the_budget(asked: int) -> None:
    operator = await serving(budget=TWO_L4)
    await scale(operator, asked)
    scale_the_child(operator, 6)
    await operator.settle()
    assert (replicas(operator), cost(operator)) == (min(asked, 2), [588, 1175][min(asked, 2) - 1])
    assert operator.condition("Ready")["status"] == "True"
    exceeded = operator.condition("BudgetExceeded")
    assert ("pays for 2: 2 run" in exceeded["message"]) if asked == 10 else exceeded == {}


@pytest.mark.parametrize("edited", ["", "many", "-3", "9" * 5000])
async def test_an_annotation_that_somebody_edited_is_written_again(edited: str) -> None:
    operator = await serving(budget=TWO_L4, replicas=2)
    operator.cluster.edit(
        DEPLOYMENT, "demo", lambda live: live["metadata"]["annotations"].update({BUDGETED_ANNOTATION: edited})
    )
    await operator.settle()
    annotations = operator.cluster.the(DEPLOYMENT)["metadata"]["annotations"]
    assert (replicas(operator), annotations[BUDGETED_ANNOTATION]) == (2, "2")


async def test_a_restarted_operator_takes_back_what_was_added_meanwhile() -> None:
    operator = await serving(budget=TWO_L4)
    await scale(operator, 10)
    scale_the_child(operator, 6)
    again = FakeOperator(operator.cluster)
    await again.settle()
    assert replicas(again) == 2


async def test_replicas_from_before_a_smaller_budget_stay_and_none_is_added_by_hand() -> None:
    operator = await serving(replicas=4)
    respec(operator.cluster, budget=TWO_L4)
    await operator.settle()
    assert replicas(operator) == 4
    scale_the_child(operator, 9)
    await operator.settle()
    assert replicas(operator) == 4
    scale_the_child(operator, 3)
    await operator.settle()
    assert replicas(operator) == 3, "what was stopped is not paid for again"


async def test_a_deployment_that_is_deleted_beyond_the_budget_stays_at_none_and_the_status_says_why() -> None:
    """Its pods are gone with it, and what was stopped is not paid for again."""
    operator = await serving()
    respec(operator.cluster, budget={"maxMonthlyUSD": 100})
    await operator.settle()
    assert (replicas(operator), operator.condition("BudgetExceeded")) == (1, {}), "what serves is kept"
    operator.cluster.remove(DEPLOYMENT, "demo")
    await operator.settle()
    assert replicas(operator) == 0
    exceeded = operator.condition("BudgetExceeded")
    assert (exceeded["status"], exceeded["reason"]) == ("True", "BudgetExceeded")
    assert exceeded["message"] == (
        "1 replica costs $588 a month, and budget.maxMonthlyUSD $100 pays for none: none runs, and none is added. "
        "Raise budget.maxMonthlyUSD to 588 or more."
    )
    version = operator.cluster.version
    await FakeOperator(operator.cluster).settle()
    assert operator.cluster.version == version
    respec(operator.cluster, budget={"maxMonthlyUSD": 588})
    await operator.settle()
    assert (replicas(operator), operator.condition("Ready")["status"]) == (1, "True")
    assert operator.condition("BudgetExceeded") == {}


async def test_replicas_that_are_held_are_said_while_the_spec_is_refused() -> None:
    operator = await serving(replicas=3)
    respec(operator.cluster, budget=TWO_L4)
    await scale(operator, 9)
    assert replicas(operator) == 3
    assert operator.condition("BudgetExceeded")["message"] == (
        "9 replicas cost $5,289 a month, and budget.maxMonthlyUSD $1,200 pays for 2: 3 run, and no more are added. "
        "Scale down (kubectl scale llmd demo -n team --replicas=2), or raise the budget."
    )


async def test_a_load_that_needs_more_replicas_is_said_and_the_spec_is_not_written() -> None:
    operator = await serving(workload={"requestsPerMinute": 9000})
    plan, said = operator.status()["plan"], operator.condition("InsufficientReplicas")
    needed = plan["replicasForLoad"]
    assert needed > 1
    assert (plan["replicas"], plan["cost"]["monthlyUSD"]) == (1, 588)
    assert (said["status"], said["reason"]) == ("True", "LoadNeedsMoreReplicas")
    assert f"kubectl scale llmd demo -n team --replicas={needed}." in said["message"]
    assert operator.cluster.the(LLM_DEPLOYMENT)["spec"]["replicas"] == 1
    await scale(operator, needed)
    assert operator.condition("InsufficientReplicas") == {}
    assert replicas(operator) == needed


async def test_an_autoscaler_that_may_add_as_many_is_enough() -> None:
    load = {"requestsPerMinute": 9000}
    operator = await serving(workload=load, autoscaling={"maxReplicas": 30})
    assert operator.condition("InsufficientReplicas") == {}
    operator = await serving(workload=load, autoscaling={"maxReplicas": 2})
    assert "autoscaling.maxReplicas is 2: raise it to" in operator.condition("InsufficientReplicas")["message"]


async def test_a_load_on_a_cpu_is_accepted() -> None:
    operator = FakeOperator(world(manifest(workload={"requestsPerMinute": 900})))
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    assert any("not predicted on a CPU" in one["reason"] for one in operator.status()["plan"]["reasons"])
