"""Random clusters of GPU nodes, some tainted, cordoned or held by pods, and an LLMDeployment for each; by a seed.

`changes` yields the same cluster with a node more, and with a pod less: a plan may only get easier.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from millstream.plan_inputs import ClusterObjects
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import ManifestError, parse
from millstream_operator.api.rules import violations
from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.planning.facts import Facts
from tests.support.gpu_nodes import gpu_node, gpu_pod
from tests.support.infeasible_specs import DEMANDS, MODELS, PRODUCTS
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
CATALOG = load_catalog()
KNOWN = [name for name in MODELS if known_shape(name) is not None]
TAINT = {"key": "team", "value": "search", "effect": "NoSchedule"}


@dataclass(frozen=True)
class RandomCluster:
    """`number`: of the seed, to draw it again. `model`: its repository."""

    number: int
    model: str
    deployment: LLMDeployment
    nodes: tuple[Manifest, ...]
    pods: tuple[Manifest, ...]

    def facts(self) -> Facts:
        """What the operator would know of it."""
        shape = known_shape(self.model)
        assert shape is not None
        return ClusterObjects(self.nodes, self.pods).facts(self.deployment, CATALOG, shape)

    def changes(self) -> Iterator[tuple[str, RandomCluster]]:
        """Yield what was added or freed, and the cluster with it."""
        dice = random.Random(self.number)
        product = dice.choice(sorted(PRODUCTS))
        gpus = dice.choice(PRODUCTS[product])
        added = gpu_node("node-added", product, gpus)
        yield f"another node with {gpus} {product}", replace(self, nodes=(*self.nodes, added))
        if self.pods:
            ended = dice.choice(self.pods)
            left = tuple(pod for pod in self.pods if pod is not ended)
            yield f"without pod {ended['metadata']['name']}", replace(self, pods=left)


def random_cluster(number: int) -> RandomCluster:
    """Draw the cluster of a number: one to four nodes, pods on half of them, and up to two demands of the spec."""
    dice = random.Random(number)
    while True:
        nodes, pods = _nodes_and_pods(dice)
        spec: Manifest = {}
        model = dice.choice(KNOWN)
        for demand in dice.sample(DEMANDS, dice.choice((0, 0, 1, 2))):
            for field, value in demand(dice).items():
                spec[field] = {**spec[field], **value} if isinstance(value, dict) and field in spec else value
        source = {"source": {"huggingFace": {"repository": model}}}
        try:
            deployment = parse(
                manifest(model=source, accelerator={"type": "GPU"} | spec.pop("accelerator", {}), **spec)
            )
        except ManifestError:
            continue
        if not any(violations(deployment)):
            return RandomCluster(number, model, deployment, nodes, pods)


def _nodes_and_pods(dice: random.Random) -> tuple[tuple[Manifest, ...], tuple[Manifest, ...]]:
    nodes, pods = [], []
    for number in range(dice.choice((1, 2, 3, 4))):
        product = dice.choice(sorted(PRODUCTS))
        gpus = dice.choice(PRODUCTS[product])
        taints = [TAINT] if dice.random() < 0.15 else []
        closed: Manifest = {"unschedulable": True} if dice.random() < 0.1 else {}
        nodes.append(gpu_node(f"node-{number}", product, gpus, taints=taints, **closed))
        if dice.random() < 0.5:
            pods.append(gpu_pod(f"pod-{number}", f"node-{number}", dice.randint(1, gpus)))
    return tuple(nodes), tuple(pods)
