"""Ready is earned: by pods of the wanted revision, and by an answer of the model; and each change is one Event."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.client import ApiError
from millstream_operator.kube.kinds import (
    DEPLOYMENT,
    POD,
)
from tests.support.fake_cluster import Fault, pod_of
from tests.support.fake_operator import FakeOperator, respec, served, world
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]


async def test_ready_waits_for_pods_then_for_the_model() -> None:
    operator = FakeOperator(world())
    await operator.turn()
    assert operator.condition("Ready")["reason"] == "Starting"
    assert operator.model.questions == [], "a model without pods is not asked"
    operator.cluster.roll_out()
    await operator.turn()
    assert operator.condition("Ready")["status"] == "True"
    assert [path for path, _ in operator.model.questions] == ["/ready", "/v1/completions"]


async def test_the_model_is_asked_once_and_again_when_other_pods_serve() -> None:
    operator = await served()
    asked = len(operator.model.questions)
    await operator.turn()
    assert len(operator.model.questions) == asked
    (pod,) = operator.cluster.all(POD)
    operator.cluster.remove(POD, pod["metadata"]["name"])
    operator.cluster.roll_out()
    await operator.turn()
    assert len(operator.model.questions) == 2 * asked


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another configuration": ({"ready": {"config_hash": "0" * 16}}, "WrongAnswer"),
    "another model": ({"ready": {"model": "somebody"}}, "WrongAnswer"),
    "no token": ({"completion": {"choices": []}}, "WrongAnswer"),
    "two tokens": ({"completion": {"choices": [{}], "usage": {"completion_tokens": 2}}}, "WrongAnswer"),
    "no answer": ({"unreachable": "/ready gave no answer within 5 seconds"}, "ServiceUnreachable"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_pods_alone_are_not_ready(name: str) -> None:
    behaviour, reason = WRONG[name]
    operator = FakeOperator(world())
    for attribute, value in behaviour.items():
        setattr(operator.model, attribute, value)
    await operator.turn()
    operator.cluster.roll_out()
    seen = []
    for _ in range(8):
        await operator.turn()
        assert operator.condition("Ready")["status"] == "False"
        seen.append(operator.condition("Ready")["reason"])
    assert seen[0] == "AskingModel", "the node's proxy needs a moment: the first failures are no news"
    assert seen[-1] == reason
    assert len(operator.retries) >= 8, "it is asked again, with the queue's backoff"
    operator.model.unreachable, operator.model.ready = "", {}
    operator.model.completion = {"choices": [{"text": "!"}], "usage": {"completion_tokens": 1}}
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"


async def test_a_pod_that_fails_takes_ready_away_with_its_reason() -> None:
    operator = await served()
    deployment = operator.cluster.the(DEPLOYMENT)
    operator.cluster.set_status(DEPLOYMENT, "demo", {**deployment["status"], "availableReplicas": 0})
    (pod,) = operator.cluster.all(POD)
    operator.cluster.remove(POD, pod["metadata"]["name"])
    ended = {"exitCode": 1, "message": '{"reason": "CheckpointInvalid", "message": "No config.json in /models/x."}'}
    operator.cluster.put(
        pod_of(
            pod["metadata"]["name"],
            deployment["spec"]["template"],
            ready=False,
            containerStatuses=[{"name": "runtime", "state": {"terminated": ended}}],
        )
    )
    await operator.turn()
    ready = operator.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "CheckpointInvalid")
    assert ready["message"] == "No config.json in /models/x."
    assert operator.condition("Available")["status"] == "False"
    assert operator.condition("Stalled")["status"] == "True"


async def test_replicas_zero_is_asked_for_and_no_fault() -> None:
    operator = FakeOperator(world(manifest(replicas=0)))
    await operator.settle()
    ready, available = operator.condition("Ready"), operator.condition("Available")
    assert (ready["status"], ready["reason"]) == ("True", "ScaledToZero"), (
        "as wanted: no client that waits for Ready hangs"
    )
    assert (available["status"], operator.condition("ModelReady")["status"]) == ("False", "False"), "nothing serves"
    assert "currentRevision" not in operator.status()["rollout"], "nothing ever answered"
    assert operator.condition("Reconciling") == operator.condition("Stalled") == {}
    assert operator.model.questions == []


async def test_one_event_for_each_change_of_the_reason() -> None:
    operator = FakeOperator(world())
    await operator.settle()
    assert [event["reason"] for event in operator.cluster.events] == ["Starting", "Ready"]
    respec(operator.cluster, engine={"maxNumSeqs": 8})
    await operator.settle()
    assert [event["reason"] for event in operator.cluster.events][2:] == ["RollingOut", "Ready"]


async def test_an_event_that_cannot_be_written_stops_nothing() -> None:
    operator = FakeOperator(world())
    await operator.turn()
    first_event = next(i for i, request in enumerate(operator.client.written) if request.kind == "Event")
    again = FakeOperator(world(), fault=Fault(first_event, ApiError(403, "Forbidden", "no rights")))
    await again.settle()
    assert again.condition("Ready")["status"] == "True"
