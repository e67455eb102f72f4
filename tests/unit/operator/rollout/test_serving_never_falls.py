"""Random schedules of edits, scaling, cordons and tenants: pods that serve are kept, and what is feasible gets done.

Checked at each deletion of a pod that serves, at that moment:

    more pods serve than are wanted      a scale-down, or a surge that is done
    else, the spec allows it             ResourceAware, or Auto while other pods serve or after ten minutes of waiting
      and a new pod lacks a node         otherwise nothing has to be given up
      and its successor finds a node     with what the deleted pod gives up
      and becomes ready there            a few turns later, if nothing else happens before and its image is not slow

At the end of each schedule the others leave and nodes are added: then the wanted revision serves with all replicas.
"""

from __future__ import annotations

import datetime
import os
import random
from typing import Any

import pytest

from millstream_operator.api.status import RolloutPhase
from millstream_operator.diagnosis.pod_facts import digest_of_pod, is_scheduled
from millstream_operator.kube.kinds import NODE, POD
from millstream_operator.rendering.names import REVISION_LABEL
from millstream_operator.rollout.approach import SURGE_PATIENCE_SECONDS
from tests.support.fake_operator import NOW, answer_to, respec
from tests.support.gpu_nodes import L4, T4, gpu_node, gpu_pod
from tests.support.rollout_world import World, image, on_nodes
from tests.support.scheduler import NodePool

pytestmark = pytest.mark.deep

Manifest = dict[str, Any]
PRODUCTS = {"T4-16GB": T4, "L4-24GB": L4}
STRATEGIES = ("Auto", "Auto", "ResourceAware", "Availability")
SCHEDULES = int(os.environ.get("MILLSTREAM_SCHEDULES", "64"))
PARTS = 2  # of one test each
SLOW = "slow"
IMAGES = ("good", "better", "best", SLOW)
TURNS_TO_START = 4


class Schedule:
    """One cluster, and what happens to it. Minutes pass between turns."""

    def __init__(self, seed: int) -> None:
        self.rng, self.seed = random.Random(seed), seed
        self.minutes = 0
        self.drains = 0
        self.log: list[str] = []
        self.one = self._cluster()
        self.one.scheduler.now = self.now
        self.one.controller.failing[SLOW] = {}  # it loads and loads
        self.one.controller.on_drain = self.check
        self.turns = 0
        self.due: list[tuple[int, int]] = []  # turn, and how many pods serve again by then

    def _cluster(self) -> World:
        products = list(PRODUCTS.values())
        nodes = [
            gpu_node(f"n{number}", self.rng.choice(products), self.rng.choice([1, 2]))
            for number in range(self.rng.randint(1, 3))
        ]
        pools = [NodePool("pool", self.rng.choice(products), 2)] if self.rng.random() < 0.2 else []
        rollout = {"strategy": self.rng.choice(STRATEGIES)}
        return on_nodes(*nodes, pools=pools, replicas=self.rng.choice([1, 1, 2, 3]), rollout=rollout)

    def now(self) -> str:
        time = datetime.datetime.fromisoformat(NOW) + datetime.timedelta(minutes=self.minutes)
        return time.strftime("%Y-%m-%dT%H:%M:%SZ")

    # The property

    def check(self, pod: Manifest, workload: Manifest) -> None:
        """A pod that serves is deleted now."""
        self.check_successors()
        name, wanted, serving = pod["metadata"]["name"], workload["spec"]["replicas"], self.one.controller.available()
        if len(serving) - 1 >= wanted:
            return
        self.drains += 1
        where = f"seed {self.seed}: {name} is drained, {len(serving) - 1} of {wanted} serve on. {self.log}"
        strategy = self.strategy
        assert strategy != "Availability", where
        if strategy == "Auto" and len(serving) == 1:
            assert self.longest_wait_seconds() >= SURGE_PATIENCE_SECONDS, where
        assert self.one.scheduler.nodes_for(workload["spec"]["template"]["spec"], without=[name]), where
        digest = workload["spec"]["template"]["metadata"]["labels"][REVISION_LABEL]
        placed = [one for one in self.one.controller.pods() if digest_of_pod(one) == digest and is_scheduled(one)]
        assert len(placed) < wanted, where
        self.due = [*self.due, (self.turns + TURNS_TO_START, len(serving))]

    @property
    def strategy(self) -> str:
        rollout = self.one.operator.owner().spec.rollout
        return rollout.strategy.value if rollout is not None and rollout.strategy is not None else "Auto"

    def image(self) -> str | None:
        """The image that the spec asks for."""
        runtime = self.one.operator.owner().spec.runtime
        return runtime.image if runtime is not None else None

    def longest_wait_seconds(self) -> float:
        """How long a pod has waited for a node."""
        now = datetime.datetime.fromisoformat(self.now())
        conditions = [one for pod in self.one.controller.pods() for one in pod["status"].get("conditions", ())]
        since = [one["lastTransitionTime"] for one in conditions if one.get("reason") == "Unschedulable"]
        return max(((now - datetime.datetime.fromisoformat(one)).total_seconds() for one in since), default=0.0)

    # What happens

    async def run(self) -> None:
        await self.rounds(5)
        for _ in range(5):
            self.change()
            await self.rounds(self.rng.choice([1, 2, 3, 5, 9]))
        await self.all_is_free()

    async def rounds(self, number: int) -> None:
        for _ in range(number):
            self.one.operator.now = self.now()
            await self.one.operator.turn()
            self.one.controller.step()
            self.one.cluster.run_jobs(answer_to)
            self.one.cluster.collect_garbage()
            self.minutes += self.rng.choice([0, 0, 1, 6])
            self.turns += 1
            self.check_successors()

    def check_successors(self) -> None:
        found = len(self.one.controller.available())
        self.due = [(turn, serving) for turn, serving in self.due if found < serving]
        for turn, serving in self.due:
            late = turn <= self.turns and self.image() != SLOW
            assert not late, f"seed {self.seed}: {found} of {serving} serve again. {self.log}"

    def change(self) -> None:
        acts = (self.edit, self.edit, self.scale, self.scale, self.cordon, self.tenant, self.tenant, self.restart)
        act = self.rng.choice(acts)
        act()
        self.due = []

    def edit(self) -> None:
        edits: list[dict[str, Any]] = [
            image(self.rng.choice(IMAGES)),
            {"parallelism": {"tensor": self.rng.choice([1, 2])}},
            {"accelerator": {"type": "GPU", "products": self.rng.sample(list(PRODUCTS), self.rng.randint(1, 2))}},
            {"rollout": {"strategy": self.rng.choice(STRATEGIES)}},
        ]
        self.note(**self.rng.choice(edits))

    def scale(self) -> None:
        """A person or an autoscaler."""
        self.note(replicas=self.rng.choice([0, 1, 1, 2, 3]))

    def note(self, **spec: Any) -> None:
        self.log.append(str(spec))
        respec(self.one.cluster, **spec)

    def cordon(self) -> None:
        name, cordoned = self.rng.choice(self.nodes()), self.rng.random() < 0.6
        self.log.append(f"{'cordon' if cordoned else 'uncordon'} {name}")
        self.one.cordon(name, cordoned=cordoned)

    def tenant(self) -> None:
        """Another tenant's pod comes, or goes."""
        theirs = self.theirs()
        name = self.rng.choice(self.nodes())
        node = self.one.cluster.the(NODE, name, "")
        if theirs and self.rng.random() < 0.5:
            self.log.append(f"{theirs[0]} goes")
            self.one.cluster.remove(POD, theirs[0])
        elif int(node["status"]["allocatable"]["nvidia.com/gpu"]) > self.one.scheduler.held()[name]:
            self.log.append(f"a tenant on {name}")
            self.one.cluster.put(gpu_pod(f"theirs-{self.one.cluster.version}", name))

    def restart(self) -> None:
        self.log.append("restart")
        self.one.restart()

    def nodes(self) -> list[str]:
        return [node["metadata"]["name"] for node in self.one.cluster.all(NODE)]

    def theirs(self) -> list[str]:
        return [name for pod in self.one.cluster.all(POD) if (name := pod["metadata"]["name"]).startswith("theirs")]

    # The end

    async def all_is_free(self) -> None:
        """A rollout that was put off, blocked or never begun gets done once it can."""
        for name in self.theirs():
            self.one.cluster.remove(POD, name)
        for name in self.nodes():
            self.one.cordon(name, cordoned=False)
        for number, product in enumerate(PRODUCTS.values()):
            self.one.cluster.put(gpu_node(f"free-{number}", product, 8))
        self.due = []
        del self.one.controller.failing[SLOW]
        for _ in range(25):
            await self.rounds(1)
            if self.is_done():
                break
        spec, where = self.one.operator.owner().spec, f"seed {self.seed}: {self.log} {self.one.status['conditions']}"
        assert self.one.operator.condition("Ready")["status"] == "True", where
        assert self.one.operator.condition("RolloutBlocked") == {}, where
        assert self.one.images() == [self.image()] * spec.replicas, where

    def is_done(self) -> bool:
        ready, rollout = self.one.operator.condition("Ready"), self.one.status.get("rollout", {})
        return ready.get("status") == "True" and rollout.get("phase") == RolloutPhase.COMPLETE


@pytest.mark.parametrize("part", range(PARTS))
async def test_serving_pods_are_kept_and_what_is_feasible_gets_done(part: int) -> None:
    drains = 0
    for seed in range(part, SCHEDULES, PARTS):
        schedule = Schedule(seed)
        await schedule.run()
        drains += schedule.drains
    assert drains > 0, "pods were replaced in place"
