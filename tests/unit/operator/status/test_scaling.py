"""Scaling is no incident: Ready stays True while a replica of the wanted revision answers and none fails."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.kube.kinds import DEPLOYMENT, NODE, POD
from tests.support.fake_operator import FakeOperator, respec
from tests.support.rollout_controller import ended
from tests.support.rollout_world import GPU, World, image, served

Manifest = dict[str, Any]


def kinds(one: World) -> set[str]:
    """The abnormal conditions."""
    found = {condition["type"] for condition in one.status["conditions"]}
    return found & {"Reconciling", "Stalled", "ReplicasBlocked"}


async def settle_and_see(one: World, **spec: Any) -> list[tuple[str, str]]:
    """(status, reason) of Ready after each step of the change."""
    seen: list[tuple[str, str]] = []

    def look(_: World) -> None:
        ready = one.operator.condition("Ready")
        seen.append((ready["status"], ready["reason"]))

    respec(one.cluster, **spec)
    await one.settle(look)
    return seen


def warnings(one: World) -> list[str]:
    return [event["reason"] for event in one.cluster.events if event["type"] == "Warning"]


async def test_scaling_up_keeps_ready_and_shows_progress_as_reconciling() -> None:
    one = await served("Availability")
    events = len(one.cluster.events)
    respec(one.cluster, replicas=2)
    await one.operator.turn()
    ready, progress = one.operator.condition("Ready"), one.operator.condition("Reconciling")
    assert (ready["status"], ready["reason"], ready["observedGeneration"]) == ("True", "Ready", 2)
    assert (progress["status"], progress["reason"]) == ("True", "Scaling")
    assert progress["message"].startswith("1 of 2 replicas available")
    assert one.operator.condition("ModelReady")["status"] == "True"
    assert one.status["rollout"]["phase"] == "Complete", "no revision is being rolled out"
    assert set(await settle_and_see(one, replicas=2)) == {("True", "Ready")}
    assert kinds(one) == set()
    assert one.status["availableReplicas"] == 2
    assert one.cluster.events[events:] == [], "neither a Warning nor other news"


async def test_each_new_replica_is_asked_through_the_service() -> None:
    one = await served("Availability")
    asked = len(one.operator.model.questions)
    await one.apply(replicas=2)
    assert len(one.operator.model.questions) > asked


async def test_scaling_down_keeps_ready() -> None:
    one = await served("Availability", replicas=3)
    events = len(one.cluster.events)
    assert set(await settle_and_see(one, replicas=1)) == {("True", "Ready")}
    assert one.images() == ["good"]
    assert one.cluster.events[events:] == []


async def test_scaling_to_zero_and_back_is_asked_for_and_no_warning() -> None:
    one = await served("Availability")
    events = len(one.cluster.events)
    await one.apply(replicas=0)
    assert one.operator.condition("Ready")["reason"] == "ScaledToZero"
    await one.apply(replicas=1)
    assert one.operator.condition("Ready")["reason"] == "Ready"
    assert {event["type"] for event in one.cluster.events[events:]} <= {"Normal"}


async def test_until_the_last_pod_is_gone_the_status_says_what_it_waits_for() -> None:
    one = await served("Availability")
    respec(one.cluster, replicas=0, engine={"maxNumSeqs": 8})
    await one.operator.turn()
    ready = one.operator.condition("Ready")
    assert (ready["status"], ready["message"]) == ("False", "spec.replicas is 0: waiting until no pod is left.")
    await one.settle()
    assert one.operator.condition("Ready")["reason"] == "ScaledToZero"


async def test_a_lost_probe_while_the_proxy_learns_of_the_new_pod_takes_nothing_away() -> None:
    one = await served("Availability")
    respec(one.cluster, replicas=2)
    one.operator.model.unreachable = "/ready could not be asked: ClientConnectorError"
    await one.operator.turn()
    one.controller.step()
    one.controller.step()
    await one.operator.turn()
    assert one.operator.retries, "it is asked again"
    assert one.operator.condition("Ready")["status"] == "True"


async def test_new_replicas_that_find_no_gpu_leave_ready_and_are_shown() -> None:
    one = await served(gpus=1, accelerator=GPU)
    before, events = one.restarts(), len(one.cluster.events)
    await one.apply(replicas=2)
    assert before.items() <= one.restarts().items()
    ready, blocked = one.operator.condition("Ready"), one.operator.condition("ReplicasBlocked")
    assert (ready["status"], ready["reason"]) == ("True", "Ready")
    assert (blocked["status"], blocked["reason"]) == ("True", "InsufficientGPU")
    assert "1 of 2 replicas available" in blocked["message"]
    assert "nvidia.com/gpu" in blocked["message"]
    assert one.operator.condition("PodsScheduled")["reason"] == "InsufficientGPU"
    assert kinds(one) == {"Reconciling", "ReplicasBlocked"}
    assert warnings(one) == []
    assert one.cluster.events[events:] == []
    written = len(one.operator.client.written)
    for _ in range(3):
        await one.operator.turn()
    assert len(one.operator.client.written) == written
    await one.apply(replicas=1)
    assert kinds(one) == set()


REFUSALS = {
    "a quota is full": ("exceeded quota: gpu", "QuotaExceeded", "Reconciling"),
    "a policy says no": ('violates PodSecurity "restricted:latest": x', "AdmissionDenied", "Stalled"),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_new_replicas_that_cannot_be_created_leave_ready(name: str) -> None:
    message, reason, way = REFUSALS[name]
    one = await served("Availability")
    respec(one.cluster, replicas=2)
    await one.operator.turn()
    failure = {"type": "ReplicaFailure", "status": "True", "message": message}
    live = one.cluster.the(DEPLOYMENT)
    counts = {"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1, "availableReplicas": 1}
    status = {"observedGeneration": live["metadata"]["generation"], "conditions": [failure]}
    one.cluster.set_status(DEPLOYMENT, "demo", status | counts)
    await one.operator.turn()
    assert one.operator.condition("Ready")["status"] == "True"
    assert one.operator.condition("ReplicasBlocked")["reason"] == reason
    assert kinds(one) == {way, "ReplicasBlocked"}, "without a person it never gets there, where a person is needed"
    assert warnings(one) == []


async def test_a_new_replica_that_fails_takes_ready_away_with_its_reason() -> None:
    no_folder = json.dumps({"reason": "CheckpointInvalid", "message": "The model folder /models/x does not exist."})
    one = await served("Availability")
    one.controller.failing["good"] = ended(no_folder)
    await one.apply(replicas=2)
    ready = one.operator.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "CheckpointInvalid")
    assert one.operator.condition("Available")["status"] == "True"


async def test_one_of_two_replicas_is_replaced_without_an_incident() -> None:
    """A node was drained, or a pod deleted: the other replica serves."""
    one = await served("Availability", replicas=2)
    events = len(one.cluster.events)
    first, _ = one.controller.pods()
    one.cluster.remove(POD, first["metadata"]["name"])
    one.controller.step()
    await one.operator.turn()
    assert one.operator.condition("Ready")["status"] == "True"
    assert one.operator.condition("Reconciling")["reason"] == "Scaling"
    await one.settle()
    assert kinds(one) == set()
    assert one.cluster.events[events:] == []


async def test_a_deleted_deployment_comes_back_and_the_status_does_not_contradict_itself() -> None:
    """Its new object counts no replica yet, but the pods of the deleted one are ready until they end."""
    one = await served("Availability", replicas=2)
    one.cluster.remove(DEPLOYMENT, "demo")
    await one.operator.turn()
    assert one.cluster.the(DEPLOYMENT, "demo").get("status", {}) == {}
    ready, available = one.operator.condition("Ready"), one.operator.condition("Available")
    assert (ready["status"], available["status"]) == ("True", "True")
    for pod in one.controller.pods():
        one.cluster.remove(POD, pod["metadata"]["name"])
    await one.operator.turn()
    ready, available = one.operator.condition("Ready"), one.operator.condition("Available")
    assert (ready["status"], available["status"]) == ("False", "False")
    await one.settle()
    assert kinds(one) == set()


async def test_the_last_replica_that_goes_takes_ready_away_and_that_is_news() -> None:
    one = await served("Availability")
    (pod,) = one.controller.pods()
    one.cluster.remove(POD, pod["metadata"]["name"])
    one.controller.step()
    await one.operator.turn()
    assert one.operator.condition("Ready")["status"] == "False"
    assert warnings(one) == ["RollingOut"], "nobody asked for it"


async def test_a_change_of_the_revision_is_not_called_scaling() -> None:
    one = await served("Availability", replicas=2)
    respec(one.cluster, **image("better"), replicas=3)
    await one.operator.turn()
    assert one.operator.condition("Ready")["status"] == "False"
    one.controller.step()
    one.controller.step()
    await one.operator.turn()
    assert one.operator.condition("Ready")["reason"] == "RollingOut"
    await one.settle()
    assert one.operator.condition("Ready")["status"] == "True"


async def test_a_revision_that_never_answered_completely_is_not_ready_with_some_of_its_replicas() -> None:
    one = await served("Availability", replicas=1)
    respec(one.cluster, **image("better"), replicas=2)
    available: list[int] = []

    def look(_: World) -> None:
        ready = one.operator.condition("Ready")
        if (ready["status"], ready["observedGeneration"]) == ("True", 2):
            available.append(one.images().count("better"))

    await one.settle(look)
    assert set(available) == {2}


async def test_a_restarted_operator_in_the_middle_of_scaling_changes_nothing() -> None:
    one = await served(gpus=1, accelerator=GPU)
    await one.apply(replicas=2)
    restarted = FakeOperator(one.cluster)
    await restarted.turn()
    assert restarted.writes == []
    assert one.operator.condition("Ready")["status"] == "True"
    assert one.cluster.all(NODE) == []
