"""A Deployment that somebody paused is named, with the hand that did it; one that is deleted is not Ready."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import DEPLOYMENT, LLM_DEPLOYMENT
from millstream_operator.leadership.ownership import Release
from tests.support.fake_operator import FakeOperator, respec, served

Manifest = dict[str, Any]
HANDS = [
    {"manager": "millstream-operator", "fieldsV1": {"f:spec": {"f:replicas": {}}}},
    {"manager": "kubectl-rollout", "fieldsV1": {"f:spec": {"f:paused": {}}}},
]


def pause(operator: FakeOperator, hands: list[Manifest]) -> None:
    def change(live: Manifest) -> None:
        live["spec"]["paused"] = True
        live["metadata"]["managedFields"] = hands

    operator.cluster.edit(DEPLOYMENT, "demo", change)


@pytest.mark.parametrize(
    ("hands", "named"), [(HANDS, " by the field manager kubectl-rollout "), ([], "is paused (spec")]
)
async def test_a_rollout_that_somebody_paused_is_named_with_the_field_manager(
    hands: list[Manifest], named: str
) -> None:
    operator = await served()
    pause(operator, hands)
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True", "it serves what it should"
    respec(operator.cluster, engine={"maxNumSeqs": 3})
    await operator.settle(roll_out=False)
    ready = operator.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "RolloutPaused")
    assert "The Deployment demo is paused" in ready["message"]
    assert named in ready["message"]
    assert "kubectl rollout resume deployment/demo -n team" in ready["message"]
    assert operator.condition("Stalled")["status"] == "True"
    assert operator.cluster.the(DEPLOYMENT)["spec"]["paused"] is True, "the hand's field stays"
    operator.cluster.edit(DEPLOYMENT, "demo", lambda live: live["spec"].pop("paused"))
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"


def delete_later(operator: FakeOperator) -> None:
    marks = {"deletionTimestamp": "2025-01-01T00:00:00Z", "finalizers": ["example.com/backup"]}
    operator.cluster.edit(LLM_DEPLOYMENT, "demo", lambda live: live["metadata"].update(marks))


async def test_what_waits_for_a_finalizer_is_not_ready_and_keeps_its_pods() -> None:
    operator = await served()
    before = operator.cluster.the(DEPLOYMENT)
    delete_later(operator)
    for _ in range(3):
        await operator.turn()
    ready = operator.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Terminating")
    assert "example.com/backup" in ready["message"]
    assert operator.condition("Reconciling")["status"] == "True"
    assert operator.condition("Available")["status"] == "True"
    assert operator.writes[-1] == ("apply", "LLMDeployment/status")
    assert operator.cluster.the(DEPLOYMENT) == before
    version = operator.cluster.version
    await operator.turn()
    assert operator.cluster.version == version, "it is said once"


async def test_another_release_says_nothing_of_a_deletion() -> None:
    operator = await served()
    operator.cluster.edit(
        LLM_DEPLOYMENT, "demo", lambda live: live["status"].update(managedBy={"namespace": "a", "name": "a-millstream"})
    )
    delete_later(operator)
    other = FakeOperator(operator.cluster, release=Release("b", "b-millstream"))
    await other.turn()
    assert other.writes == []
