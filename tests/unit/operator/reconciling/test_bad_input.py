"""Bad input that admission cannot catch: one condition, nothing half done, and the last good state serves on.

Elsewhere: what is wrong in one object alone (`api/test_load.py`, `api/test_rules.py`, `e2e/test_api.py`), impossible
plans (`planning/golden/no-*`), foreign objects and hand edits (`test_repair.py`), folders without a model
(`engine/test_checkpoint.py`).
"""

from __future__ import annotations

import pytest

from millstream_operator.kube.client import ApiError
from millstream_operator.kube.kinds import DEPLOYMENT, LLM_DEPLOYMENT, SERVICE
from tests.support.fake_cluster import Fault
from tests.support.fake_operator import FakeOperator, respec, served, world
from tests.support.llmdeployments import manifest


async def test_two_deployments_may_serve_the_same_name_each_through_its_own_service() -> None:
    """The Service is called after the object, which is unique; the served name is only what requests carry."""
    source = {"servedName": "chat", "source": {"local": {"path": "demo-chat"}}}
    operator = await served(manifest(model=source))
    twin = manifest("twin", model=source)
    twin["metadata"]["uid"] = "uid-of-the-twin"
    operator.cluster.put(twin)
    await operator.settle("twin")
    for name in ("demo", "twin"):
        assert operator.condition("Ready", name)["status"] == "True"
        assert operator.condition("NameConflict", name) == {}
        assert operator.status(name)["model"]["servedName"] == "chat"
    selectors = [operator.cluster.the(SERVICE, name)["spec"]["selector"] for name in ("demo", "twin")]
    assert selectors[0] != selectors[1], "neither gets the other's requests"


async def test_a_name_that_is_another_ones_child_takes_nothing_over() -> None:
    """A Deployment of somebody else's operator that is called as ours would be."""
    cluster = world()
    theirs = {"apiVersion": "example.com/v1", "kind": "Server", "name": "demo", "uid": "x", "controller": True}
    template = {"metadata": {"labels": {}}, "spec": {"containers": [{"name": "server", "image": "x"}]}}
    cluster.put(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "demo", "namespace": "team", "ownerReferences": [theirs]},
            "spec": {"replicas": 1, "selector": {"matchLabels": {}}, "template": template},
        }
    )
    before = cluster.the(DEPLOYMENT)
    operator = FakeOperator(cluster)
    await operator.turn()
    assert "it belongs to Server demo" in operator.condition("NameConflict")["message"]
    assert cluster.the(DEPLOYMENT) == before
    assert operator.condition("Stalled")["reason"] == "NameConflict"


async def test_a_webhook_that_is_away_is_told_and_passes() -> None:
    """A 500 of the API server, which says nothing else: without a status no one would know what it waits for."""
    away = ApiError(500, "InternalError", 'failed calling webhook "policy.example.com": connection refused')
    operator = FakeOperator(world(), fault=Fault(4, away))
    await operator.turn()
    ready = operator.condition("Ready")
    assert ready["reason"] == "AdmissionUnavailable"
    assert "policy.example.com" in ready["message"]
    assert operator.condition("Stalled") == {}
    assert operator.condition("Reconciling")["reason"] == "AdmissionUnavailable"
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"


async def test_what_serves_is_watched_while_a_newer_spec_is_refused() -> None:
    operator = await served()
    respec(operator.cluster, speculation={"method": "EAGLE"})
    await operator.turn()
    assert operator.condition("Available")["status"] == "True"
    live = operator.cluster.the(DEPLOYMENT)["status"]
    operator.cluster.set_status(DEPLOYMENT, "demo", {**live, "availableReplicas": 0, "readyReplicas": 0})
    await operator.turn()
    assert operator.condition("Available")["status"] == "False", "Available must not outlive the pods"
    assert operator.condition("Ready")["reason"] == "UnsupportedByRuntime"
    assert operator.status()["availableReplicas"] == 0


@pytest.mark.parametrize(
    "spec", [{"replicas": "many"}, {"model": {}}, {"engine": [1]}, {"budget": {"maxMonthlyUSD": 0.5}}]
)
async def test_a_spec_of_wrong_types_that_was_stored_all_the_same_changes_nothing(spec: dict[str, object]) -> None:
    operator = await served()
    before = {key: value for key, value in operator.cluster.snapshot().items() if key[0] != LLM_DEPLOYMENT.kind}
    respec(operator.cluster, **spec)
    operator.cluster.events.clear()
    for _ in range(3):
        await operator.turn()
    assert operator.condition("Ready")["reason"] == "InvalidSpec"
    events = [(event["type"], event["reason"], event["involvedObject"]["name"]) for event in operator.cluster.events]
    assert events == [("Warning", "InvalidSpec", "demo")], "one Event"
    assert operator.condition("Available")["status"] == "True"
    after = {key: value for key, value in operator.cluster.snapshot().items() if key[0] != LLM_DEPLOYMENT.kind}
    assert after == before
