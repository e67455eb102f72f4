"""Budgets hold after `kubectl scale`, and a load that needs more replicas is said: in a simulated GPU cluster."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import DEPLOYMENT, LLM_DEPLOYMENT
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


async def test_an_autoscaler_beyond_the_budget_is_a_condition() -> None:
    operator = await serving(budget=TWO_L4, autoscaling={"maxReplicas": 8})
    for kind, status in (("BudgetExceeded", "True"), ("Autoscaled", "False")):
        found = operator.condition(kind)
        assert (found["status"], found["reason"]) == (status, "BudgetExceeded")
        assert "set maxReplicas to 2 or less" in found["message"]


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
