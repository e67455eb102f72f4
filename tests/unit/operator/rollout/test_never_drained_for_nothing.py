"""Random clusters and random changes: a pod that serves is deleted only if its successor could be scheduled then."""

from __future__ import annotations

import random
from typing import Any

import pytest

from millstream_operator.kube.kinds import NODE, POD
from tests.support.fake_operator import answer_to, respec
from tests.support.gpu_nodes import A100_40, L4, T4, gpu_node, gpu_pod
from tests.support.rollout_world import World, image, on_nodes
from tests.support.scheduler import NodePool

pytestmark = pytest.mark.deep

Manifest = dict[str, Any]
PRODUCTS = {"T4-16GB": T4, "L4-24GB": L4, "A100-40GB": A100_40}
SEEDS = 30
KINDS = ("image", "image", "image", "products", "tensor", "drain", "strategy", "replicas", "cordon", "tenant", "tenant")
STRATEGIES = ("Auto", "ResourceAware", "ResourceAware", "Availability")


class Drains:
    """Checks each deletion of a pod that serves, at that moment."""

    def __init__(self, one: World, case: str) -> None:
        self.one, self.case, self.seen = one, case, 0
        one.controller.on_drain = self.check

    def check(self, pod: Manifest, workload: Manifest) -> None:
        name, wanted = pod["metadata"]["name"], workload["spec"]["replicas"]
        if len(self.one.controller.available()) - 1 >= wanted:
            return  # one more than wanted
        self.seen += 1
        template = workload["spec"]["template"]["spec"]
        nodes = self.one.scheduler.nodes_for(template, without=[name])
        assert nodes, f"{self.case}: {name} is drained, and no node would take its successor"


def world_of(rng: random.Random) -> World:
    objects = [
        gpu_node(f"n{number}", rng.choice(list(PRODUCTS.values())), rng.choice([1, 2, 4]))
        for number in range(rng.randint(1, 4))
    ]
    pools = [NodePool("pool", rng.choice(list(PRODUCTS.values())), rng.choice([1, 2]))] if rng.random() < 0.3 else []
    return on_nodes(
        *objects, pools=pools, replicas=rng.choice([1, 1, 2, 3]), rollout={"strategy": rng.choice(STRATEGIES)}
    )


def change(one: World, rng: random.Random) -> None:
    """One thing that a user, another tenant or an administrator does."""
    nodes = [node["metadata"]["name"] for node in one.cluster.all(NODE)]
    kind = rng.choice(KINDS)
    strategy = one.operator.owner().spec.rollout
    given = {"strategy": strategy.strategy.value} if strategy and strategy.strategy else {}
    if kind == "image":
        respec(one.cluster, **image(rng.choice(["good", "better", "best", "crashing"])))
    elif kind == "products":
        respec(one.cluster, accelerator={"type": "GPU", "products": rng.sample(list(PRODUCTS), rng.randint(1, 2))})
    elif kind == "tensor":
        respec(one.cluster, parallelism={"tensor": rng.choice([1, 2, 4])})
    elif kind == "drain":
        respec(one.cluster, rollout={**given, "drainTimeout": f"{rng.randint(1, 9)}m"})
    elif kind == "strategy":
        respec(one.cluster, rollout={"strategy": rng.choice(STRATEGIES)})
    elif kind == "replicas":
        respec(one.cluster, replicas=rng.choice([1, 2, 3]))
    elif kind == "cordon":
        one.cordon(rng.choice(nodes), cordoned=rng.random() < 0.6)
    else:
        theirs = [pod["metadata"]["name"] for pod in one.cluster.all(POD) if "theirs" in pod["metadata"]["name"]]
        held, node = one.scheduler.held(), one.cluster.get(NODE, rng.choice(nodes), "")
        if theirs and rng.random() < 0.5:
            one.cluster.remove(POD, rng.choice(theirs))
        elif node is not None and int(node["status"]["allocatable"]["nvidia.com/gpu"]) > held[node["metadata"]["name"]]:
            one.cluster.put(gpu_pod(f"theirs-{one.cluster.version}", node["metadata"]["name"]))


async def rounds(one: World, number: int) -> None:
    for _ in range(number):
        await one.operator.turn()
        one.controller.step()
        one.cluster.run_jobs(answer_to)
        one.cluster.collect_garbage()


@pytest.mark.parametrize("drain_steps", [0, 2])
async def test_a_pod_that_serves_is_deleted_only_if_its_successor_could_be_scheduled(drain_steps: int) -> None:
    seen = 0
    for seed in range(SEEDS):
        rng = random.Random(1000 * drain_steps + seed)
        one = world_of(rng)
        one.controller.drain_steps = drain_steps
        one.scheduler._choose = rng.choice
        drains = Drains(one, f"seed {seed}")
        await rounds(one, 5)
        for _ in range(8):
            change(one, rng)
            if rng.random() < 0.2:
                one.restart()
            await rounds(one, rng.randint(1, 6))
        seen += drains.seen
    assert seen > SEEDS, "pods were drained, in place and after a surge"
