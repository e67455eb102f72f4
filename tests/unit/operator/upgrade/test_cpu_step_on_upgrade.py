"""An operator that counts the largest step of a CPU takes over deployments whose plans counted 256 MiB for it: their
pods run on, though it would plan them otherwise, or refuse them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.catalog.known_models import known_shape
from millstream_operator.kube.kinds import CONTROLLER_REVISION, DEPLOYMENT, POD
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.sizing import cpu_memory
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import render_revision
from millstream_operator.rollout.outdated import outdated
from millstream_operator.rollout.revisions import pinned
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import FakeOperator, respec, world
from tests.support.llmdeployments import deployment, manifest

Manifest = dict[str, Any]
REPOSITORY = "meta-llama/Llama-3.2-1B-Instruct"
# Of 2.3 GiB of weights: an earlier plan fitted into the first; into the second both do, with other ledgers.
LIMITS = {"refused today": "3700Mi", "planned otherwise today": "5Gi"}
POLICIES: dict[str, Manifest] = {"pinned": {}, "follows": {"runtime": {"updatePolicy": "FollowOperator"}}}
EVERY_CASE = [(memory, policy) for memory in LIMITS for policy in POLICIES]


def spec_of(memory: str, policy: str) -> Manifest:
    limited = [{"name": "runtime", "resources": {"limits": {"memory": LIMITS[memory]}}}]
    return {
        "model": {"source": {"huggingFace": {"repository": REPOSITORY}}},
        "engine": {"maxModelLen": 4096},
        "podTemplate": {"spec": {"containers": limited}},
        **POLICIES[policy],
    }


def as_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula of earlier releases: 256 MiB for the step of every model, and no margin."""
    monkeypatch.setattr(cpu_memory, "_largest_step", lambda *sizes: lambda limit_bytes: cpu_memory.LEAST_STEP_BYTES)
    monkeypatch.setattr(cpu_memory, "MARGIN_PERCENT", 0)


async def served_before(memory: str, policy: str) -> FakeCluster:
    """A cluster in which an earlier operator planned the model, and its pods serve."""
    cluster = world(manifest(**spec_of(memory, policy)))
    with pytest.MonkeyPatch.context() as patch:
        as_earlier(patch)
        operator = FakeOperator(cluster)
        await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    return cluster


def running(cluster: FakeCluster) -> str:
    return json.dumps([cluster.all(POD), cluster.the(DEPLOYMENT)["spec"]], sort_keys=True)


def decided(memory: str, policy: str) -> Plan | Infeasible:
    facts = Facts(shape=known_shape(REPOSITORY))
    return decide(deployment(**spec_of(memory, policy)), PlanDefaults("registry.example.com/runtime:1"), facts)


@pytest.mark.parametrize(("memory", "policy"), EVERY_CASE)
def test_the_plans_differ(memory: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the cases below show something."""
    today = decided(memory, policy)
    as_earlier(monkeypatch)
    before = decided(memory, policy)
    assert isinstance(before, Plan), before.message
    assert isinstance(today, Infeasible if memory == "refused today" else Plan)
    assert not isinstance(today, Plan) or today.memory != before.memory


@pytest.mark.parametrize(("memory", "policy"), EVERY_CASE)
async def test_the_next_operator_restarts_no_pod(memory: str, policy: str) -> None:
    cluster = await served_before(memory, policy)
    before, records = running(cluster), cluster.all(CONTROLLER_REVISION)
    operator = FakeOperator(cluster)
    await operator.settle()
    assert running(cluster) == before
    assert cluster.all(CONTROLLER_REVISION) == records
    assert {*operator.writes} <= {("apply", "LLMDeployment/status")}
    assert operator.condition("Ready")["status"] == "True"
    assert operator.condition("PlanOutdated").get("status") != "True"


@pytest.mark.parametrize(("memory", "policy"), EVERY_CASE)
async def test_an_edit_that_reaches_no_pod_restarts_none_and_keeps_the_plan(memory: str, policy: str) -> None:
    cluster = await served_before(memory, policy)
    template = cluster.the(DEPLOYMENT)["spec"]["template"]
    operator = FakeOperator(cluster)
    respec(cluster, replicas=2)
    await operator.settle()
    assert cluster.the(DEPLOYMENT)["spec"]["template"] == template
    assert cluster.the(DEPLOYMENT)["spec"]["replicas"] == 2


async def test_an_edit_that_needs_a_new_plan_is_refused_with_the_memory_that_it_needs_while_the_pods_serve() -> None:
    cluster = await served_before("refused today", "pinned")
    before = running(cluster)
    operator = FakeOperator(cluster)
    respec(cluster, engine={"maxModelLen": 4080})
    await operator.settle()
    assert running(cluster) == before
    shown = json.dumps(operator.status())
    assert "for the largest step" in shown
    assert "podTemplate.spec.containers[runtime].resources.limits.memory: 5Gi" in shown


@pytest.mark.parametrize(("memory", "policy"), EVERY_CASE)
async def test_a_record_of_an_earlier_plan_is_neither_planned_anew_nor_outdated(memory: str, policy: str) -> None:
    cluster = await served_before(memory, policy)
    owner, defaults = deployment(**spec_of(memory, policy)), PlanDefaults("registry.example.com/runtime:1")
    pin = pinned(owner, cluster.all(CONTROLLER_REVISION))
    assert pin is not None
    facts = Facts(shape=known_shape(REPOSITORY), model_revision=pin.revision.resolved_revision)
    found = outdated(
        pin.revision,
        facts,
        lambda known: decide(owner, defaults, known),
        lambda plan: render_revision(owner, plan, PodDefaults()),
        follows=policy == "follows",
    )
    assert found is None
