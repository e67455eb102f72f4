"""Another's autoscaler of our Deployment: the operator keeps to spec.replicas, and a condition names it and the fix."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.children.foreign_autoscalers import conflict_with
from millstream_operator.kube.client import ApiError
from millstream_operator.kube.kinds import DEPLOYMENT, HORIZONTAL_POD_AUTOSCALER
from tests.support.fake_operator import FakeOperator, respec, served
from tests.support.llmdeployments import NAMESPACE, manifest

Manifest = dict[str, Any]
OURS = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "demo"}


def autoscaler(target: Manifest, name: str = "web", *, of: Manifest | None = None) -> Manifest:
    metadata: Manifest = {"name": name, "namespace": NAMESPACE}
    if of is not None:
        metadata["ownerReferences"] = [{**of, "controller": True, "uid": "uid-of-another"}]
    spec = {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 9}
    return {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": metadata, "spec": spec}


def scale_the_child(operator: FakeOperator, replicas: int) -> None:
    operator.cluster.edit(DEPLOYMENT, "demo", lambda live: live["spec"].update(replicas=replicas))


async def contested(*autoscalers: Manifest, **spec: Any) -> FakeOperator:
    """An operator whose Deployment somebody scaled to 4."""
    operator = await served(manifest(**spec))
    for one in autoscalers:
        operator.cluster.put(one)
    scale_the_child(operator, 4)
    await operator.settle()
    assert operator.cluster.the(DEPLOYMENT)["spec"]["replicas"] == 1
    assert operator.condition("Ready")["status"] == "True"
    return operator


async def test_an_autoscaler_of_the_deployment_is_named_with_the_fix() -> None:
    operator = await contested(autoscaler(OURS))
    found = operator.condition("AutoscalerConflict")
    assert (found["status"], found["reason"]) == ("True", "AutoscalerConflict")
    assert "HorizontalPodAutoscaler web scales the Deployment demo" in found["message"]
    assert "kind: LLMDeployment, name: demo" in found["message"]
    assert operator.condition("Stalled") == operator.condition("Reconciling") == {}


async def test_it_is_said_of_what_made_the_autoscaler() -> None:
    """KEDA would write the scaleTargetRef back: the ScaledObject is what to edit."""
    scaled = {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "name": "web"}
    operator = await served()
    found = conflict_with(
        operator.owner(), operator.cluster.the(DEPLOYMENT), [autoscaler(OURS, "keda-hpa-web", of=scaled)]
    )
    assert found is not None
    assert "HorizontalPodAutoscaler keda-hpa-web (of the ScaledObject web)" in found.message


@pytest.mark.parametrize(
    "target",
    [
        {**OURS, "name": "other"},
        {**OURS, "kind": "StatefulSet"},
        {**OURS, "apiVersion": "example.com/v1"},
        {"apiVersion": "millstream.dev/v1alpha1", "kind": "LLMDeployment", "name": "demo"},
    ],
)
async def test_an_autoscaler_of_something_else_is_no_conflict(target: Manifest) -> None:
    operator = await contested(autoscaler(target))
    assert operator.condition("AutoscalerConflict") == {}


async def test_our_own_autoscaler_is_no_conflict() -> None:
    operator = await contested(autoscaling={"maxReplicas": 3})
    assert operator.cluster.get(HORIZONTAL_POD_AUTOSCALER, "demo") is not None
    assert operator.condition("AutoscalerConflict") == {}


async def test_the_condition_stays_across_restarts_and_goes_with_the_autoscaler() -> None:
    operator = await contested(autoscaler(OURS))
    again = FakeOperator(operator.cluster)
    await again.settle()
    assert again.writes == []
    assert again.condition("AutoscalerConflict")["status"] == "True"
    again.cluster.remove(HORIZONTAL_POD_AUTOSCALER, "web")
    await again.settle()
    assert again.condition("AutoscalerConflict") == {}


async def test_the_condition_is_kept_while_the_spec_is_refused() -> None:
    operator = await contested(autoscaler(OURS))
    respec(operator.cluster, speculation={"method": "EAGLE"})
    await operator.settle()
    assert operator.condition("Ready")["reason"] == "UnsupportedByRuntime"
    assert operator.condition("AutoscalerConflict")["status"] == "True"


async def test_nothing_is_listed_while_nobody_edits_the_replicas() -> None:
    operator = await served()
    operator.cluster.put(autoscaler(OURS))
    operator.client.requests.clear()
    respec(operator.cluster, replicas=2)
    await operator.settle()
    assert not [one for one in operator.client.requests if one.verb == "list"]


async def test_an_operator_that_may_not_list_autoscalers_goes_on() -> None:
    operator = await served()
    operator.cluster.put(autoscaler(OURS))

    async def forbidden(*_: object) -> None:
        raise ApiError(403, "Forbidden", "no")

    operator.client.list = forbidden  # type: ignore[method-assign,assignment]
    scale_the_child(operator, 4)
    await operator.settle()
    assert operator.cluster.the(DEPLOYMENT)["spec"]["replicas"] == 1
    assert operator.condition("Ready")["status"] == "True"
