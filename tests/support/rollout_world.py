"""An operator, the controllers around it, and images that fail: rollouts run turn by turn until nothing moves."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from millstream_operator.kube.kinds import LLM_DEPLOYMENT
from tests.support.fake_cluster import FakeCluster, Fault
from tests.support.fake_operator import FakeOperator, answer_to, respec, world
from tests.support.llmdeployments import manifest
from tests.support.rollout_controller import RolloutController, ended

Manifest = dict[str, Any]
NO_FOLDER = json.dumps({"reason": "CheckpointInvalid", "message": "The model folder /models/x does not exist."})
CRASHED = ended("Segmentation fault", restarts=3, code=139)
FAILING = {"bad": ended(NO_FOLDER), "crashing": CRASHED}
GPU = {"type": "GPU"}


def image(name: str) -> dict[str, Any]:
    return {"runtime": {"image": name}}


class World:
    """An operator and the controllers around it, run turn by turn until nothing moves."""

    def __init__(self, cluster: FakeCluster, fault: Fault | None = None, gpus: int | None = None) -> None:
        self.cluster = cluster
        self.operator = FakeOperator(cluster, fault=fault)
        self.controller = RolloutController(cluster, failing=FAILING, gpus=gpus)

    async def settle(self, seen: Callable[[World], None] = lambda _: None) -> None:
        for _ in range(60):
            before, retries = self.cluster.version, len(self.operator.retries)
            await self.operator.turn()
            seen(self)
            self.controller.step()
            self.cluster.run_jobs(answer_to)
            seen(self)
            self.cluster.collect_garbage()
            if (self.cluster.version, len(self.operator.retries)) == (before, retries):
                return
        raise AssertionError(f"does not settle: {self.operator.client.written[-10:]}")

    async def apply(self, **spec: Any) -> None:
        respec(self.cluster, **spec)
        await self.settle()

    @property
    def status(self) -> Manifest:
        found: Manifest = self.cluster.the(LLM_DEPLOYMENT)["status"]
        return found

    @property
    def decisions(self) -> list[str]:
        """Newest first."""
        return [entry["type"] for entry in self.status["decisions"]]

    def images(self) -> list[str]:
        return [pod["spec"]["containers"][0]["image"] for pod in self.controller.available()]

    def restarts(self) -> dict[str, str]:
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self.controller.pods()}


async def served(strategy: str | None = None, *, replicas: int = 1, gpus: int | None = None, **spec: Any) -> World:
    """A world in which image `good` serves."""
    rollout: dict[str, Any] = {"rollout": {"strategy": strategy}} if strategy else {}
    found = World(world(manifest(replicas=replicas, **image("good"), **rollout, **spec)), gpus=gpus)
    await found.settle()
    assert found.operator.condition("Ready")["status"] == "True"
    found.controller.most_pods, found.controller.fewest_available = 0, 1 << 10
    found.controller.made.clear()
    found.operator.client.requests.clear()
    return found
