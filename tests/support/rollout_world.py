"""An operator, the controllers around it, and images that fail: rollouts run turn by turn until nothing moves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from millstream_operator.kube.kinds import LLM_DEPLOYMENT, NODE
from tests.support.fake_cluster import FakeCluster, Fault
from tests.support.fake_operator import FakeOperator, answer_to, respec, world
from tests.support.gpu_nodes import gpu_node, gpu_pod, spec_on_gpu
from tests.support.llmdeployments import manifest
from tests.support.rollout_controller import RolloutController, ended
from tests.support.scheduler import NodePool, Scheduler

Manifest = dict[str, Any]
NO_FOLDER = json.dumps({"reason": "CheckpointInvalid", "message": "The model folder /models/x does not exist."})
CRASHED = ended("Segmentation fault", restarts=3, code=139)
FAILING = {"bad": ended(NO_FOLDER), "crashing": CRASHED}
GPU = {"type": "GPU"}


def image(name: str) -> dict[str, Any]:
    return {"runtime": {"image": name}}


class World:
    """An operator and the controllers around it, run turn by turn until nothing moves.

    `gpus`: GPUs of one kind, on no node that the operator sees. `scheduler`: a cluster with nodes (`on_nodes`).
    """

    def __init__(
        self,
        cluster: FakeCluster,
        fault: Fault | None = None,
        gpus: int | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        self.cluster = cluster
        self.operator = FakeOperator(cluster, fault=fault)
        self.controller = RolloutController(cluster, failing=FAILING, gpus=gpus, scheduler=scheduler)

    def restart(self, fault: Fault | None = None) -> None:
        """Another process of the operator."""
        self.operator = FakeOperator(self.cluster, fault=fault)

    async def settle(self, seen: Callable[[World], None] = lambda _: None) -> None:
        for _ in range(60):
            before, retries = self.cluster.version, len(self.operator.retries)
            for name in [one["metadata"]["name"] for one in self.cluster.all(LLM_DEPLOYMENT)]:
                await self.operator.turn(name)
                seen(self)
                self.controller.step(name)
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
    def scheduler(self) -> Scheduler:
        found = self.controller.scheduler
        assert found is not None, "this world has no nodes"
        return found

    def nodes(self) -> list[str]:
        """The node of each pod that serves."""
        return [pod["spec"]["nodeName"] for pod in self.controller.available()]

    def cordon(self, name: str, *, cordoned: bool = True) -> None:
        self.cluster.edit(NODE, name, lambda live: live["spec"].update(unschedulable=cordoned), namespace="")

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


def on_nodes(*objects: Manifest, pools: Iterable[NodePool] = (), **spec: Any) -> World:
    """A world of nodes and pods of others (`gpu_node`, `gpu_pod`), and an LLMDeployment that wants a GPU."""
    cluster = world(manifest(**spec_on_gpu(**image("good"), **spec)))
    for one in objects:
        cluster.put(one)
    return World(cluster, scheduler=Scheduler(cluster, pools=pools))


async def served_on_nodes(*objects: Manifest, pools: Iterable[NodePool] = (), **spec: Any) -> World:
    """As `on_nodes`, once image `good` serves."""
    found = on_nodes(*objects, pools=pools, **spec)
    await found.settle()
    assert found.operator.condition("Ready")["status"] == "True", found.operator.status()
    found.controller.fewest_available = 1 << 10
    return found


async def taken_after_the_drain() -> World:
    """One node with two GPUs. A new revision wants both, and a tenant takes one after the old pod was drained."""
    rollout = {"strategy": "ResourceAware"}
    one = await served_on_nodes(gpu_node("a", gpus=2), parallelism={"tensor": 1}, rollout=rollout)
    respec(one.cluster, parallelism={"tensor": 2})
    for _ in range(20):
        await one.operator.turn()
        one.cluster.run_jobs("{}")
        if not one.controller.available():
            break
        one.controller.step()
    assert one.controller.available() == [], "drained"
    one.cluster.put(gpu_pod("theirs", "a"))
    return one
