"""FollowOperator and a plan whose pods fail: back to what served, said in the status, and not tried again and again."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import CONTROLLER_REVISION, LLM_DEPLOYMENT
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import FakeOperator, answer_to, respec, world
from tests.support.llmdeployments import manifest
from tests.support.rollout_controller import RolloutController, ended

Manifest = dict[str, Any]
CRASHED = ended("Segmentation fault", restarts=3, code=139)


class Upgraded:
    """One LLMDeployment that follows, under operators with one default image after the other."""

    def __init__(self, **spec: Any) -> None:
        runtime = {"updatePolicy": "FollowOperator"}
        self.cluster: FakeCluster = world(manifest(runtime=runtime, **spec))
        self.controller = RolloutController(self.cluster, failing={"bad": CRASHED})

    async def to(self, image: str) -> FakeOperator:
        """A new operator with this default image, turned until nothing moves."""
        operator = FakeOperator(self.cluster, image=image)
        for _ in range(60):
            before, retries = self.cluster.version, len(operator.retries)
            await operator.turn()
            self.controller.step()
            self.cluster.run_jobs(answer_to)
            self.cluster.collect_garbage()
            if (self.cluster.version, len(operator.retries)) == (before, retries):
                return operator
        raise AssertionError(f"does not settle: {operator.client.written[-10:]}")

    @property
    def image(self) -> str:
        (pod,) = self.controller.available()
        found: str = pod["spec"]["containers"][0]["image"]
        return found

    @property
    def decisions(self) -> list[str]:
        """Oldest first."""
        entries = self.cluster.the(LLM_DEPLOYMENT)["status"]["decisions"]
        return [entry["type"] for entry in reversed(entries)]


STRATEGIES = pytest.mark.parametrize("strategy", ["Availability", "ResourceAware"])


@STRATEGIES
async def test_a_plan_that_was_adopted_and_failed_gives_way_to_the_one_that_served(strategy: str) -> None:
    upgraded = Upgraded(rollout={"strategy": strategy})
    await upgraded.to("good")
    operator = await upgraded.to("bad")
    assert upgraded.image == "good"
    assert operator.condition("Ready")["status"] == "True", "the spec has what it asks for"
    outdated = operator.condition("PlanOutdated")
    assert outdated["message"] == (
        "A new plan would run the image bad instead of good. It was adopted and failed (RuntimeCrashed), so it is not "
        "tried again until the spec changes."
    )
    assert upgraded.decisions.count("PlanAdopted") == 1
    assert upgraded.decisions.count("RolledBack") == 1


@STRATEGIES
async def test_what_failed_is_not_adopted_again_by_the_next_operator_either(strategy: str) -> None:
    upgraded = Upgraded(rollout={"strategy": strategy})
    await upgraded.to("good")
    await upgraded.to("bad")
    version, decisions = upgraded.cluster.version, upgraded.decisions
    operator = await upgraded.to("bad")
    assert operator.writes == []
    assert (upgraded.cluster.version, upgraded.decisions) == (version, decisions)


async def test_a_world_that_turns_to_and_fro_brings_the_failed_one_back_only_once() -> None:
    upgraded = Upgraded()
    for image in ("good", "bad", "good", "bad", "better", "bad"):
        operator = await upgraded.to(image)
    assert upgraded.image == "better"
    assert operator.condition("Ready")["status"] == "True"
    assert upgraded.decisions.count("RolledBack") == 1
    assert len(upgraded.cluster.all(CONTROLLER_REVISION)) == 3


async def test_a_changed_spec_tries_it_again() -> None:
    upgraded = Upgraded(rollout={"strategy": "Availability"})
    await upgraded.to("good")
    await upgraded.to("bad")
    upgraded.controller.failing.clear()
    respec(upgraded.cluster, engine={"maxNumSeqs": 8})
    operator = await upgraded.to("bad")
    assert upgraded.image == "bad"
    assert operator.condition("PlanOutdated") == {}
