"""Kueue's queue: copied down, kept while pods are ready, and no failure while its quota is missing."""

from __future__ import annotations

from typing import Any

from millstream_operator.kube.kinds import CONTROLLER_REVISION, DEPLOYMENT, LLM_DEPLOYMENT, POD
from millstream_operator.rendering.kueue import QUEUE_LABEL
from tests.support.fake_operator import FakeOperator, respec, served, world
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]


def label(operator: FakeOperator, queue: str) -> None:
    def change(live: Manifest) -> None:
        live["metadata"].setdefault("labels", {})[QUEUE_LABEL] = queue

    operator.cluster.edit(LLM_DEPLOYMENT, "demo", change)


def queued(queue: str = "team-a") -> Manifest:
    stored = manifest()
    stored["metadata"]["labels"] = {QUEUE_LABEL: queue, "argocd.argoproj.io/instance": "x"}
    return stored


def queues(operator: FakeOperator) -> list[str | None]:
    deployment = operator.cluster.the(DEPLOYMENT)
    return [one["metadata"]["labels"].get(QUEUE_LABEL) for one in (deployment, deployment["spec"]["template"])]


async def test_the_queue_reaches_deployment_and_pods_and_no_other_label_does() -> None:
    operator = await served(queued())
    assert queues(operator) == ["team-a", "team-a"]
    assert "argocd" not in str(operator.cluster.the(DEPLOYMENT))
    (pod,) = operator.cluster.all(POD)
    assert pod["metadata"]["labels"][QUEUE_LABEL] == "team-a"


async def test_a_queue_changes_only_while_no_pod_is_ready() -> None:
    """Kueue refuses it otherwise; and an upgrade restarts nothing that had the label already."""
    operator = await served()
    before = operator.cluster.the(DEPLOYMENT)["spec"]
    label(operator, "team-a")
    await operator.settle()
    assert operator.cluster.the(DEPLOYMENT)["spec"] == before
    assert queues(operator) == [None, None]
    assert operator.condition("PlanOutdated") == {}
    for queue in ("team-a", "team-b"):
        label(operator, queue)
        respec(operator.cluster, replicas=0)
        await operator.settle()
        respec(operator.cluster, replicas=1)
        await operator.settle()
        assert queues(operator) == [queue, queue]
        assert operator.condition("Ready")["status"] == "True"
    assert len(operator.cluster.all(CONTROLLER_REVISION)) == 3


async def test_a_label_of_pod_template_stays_the_pods_alone() -> None:
    template = {"metadata": {"labels": {QUEUE_LABEL: "pods"}}}
    operator = await served(manifest(podTemplate=template))
    assert queues(operator) == [None, "pods"]


async def test_a_pod_that_waits_for_quota_is_named_and_is_no_failure() -> None:
    operator = FakeOperator(world(queued()))
    await operator.settle(roll_out=False)
    deployment = operator.cluster.the(DEPLOYMENT)
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gated"}
    template = deployment["spec"]["template"]
    metadata = {"name": "demo-x", "namespace": "team", "labels": template["metadata"]["labels"]}
    spec = {**template["spec"], "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    status = {"phase": "Pending", "conditions": [gated]}
    operator.cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status})
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    generation = deployment["metadata"]["generation"]
    operator.cluster.set_status(DEPLOYMENT, "demo", {"observedGeneration": generation, "conditions": [late]}, "team")
    await operator.settle(roll_out=False)
    ready = operator.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "QuotaExceeded")
    assert "in the LocalQueue team-a until Kueue admits it" in ready["message"]
    assert operator.condition("Stalled") == {}
    assert operator.condition("Reconciling")["status"] == "True"
