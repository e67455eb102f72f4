"""Random LLMDeployments that no plan is likely to fit, and the GPU nodes of their cluster; repeatable by a seed.

Each draws a model, nodes, and one to three demands that cannot all be met on them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.gpu_nodes import gpu_node
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
MODELS = (
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Meta-Llama-3-8B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Meta-Llama-3-70B-Instruct",
    "Qwen/Qwen2.5-72B-Instruct",
    "Qwen/Qwen2.5-14B-Instruct",
    "mistralai/Mistral-7B-Instruct-v0.3",
    "meta-llama/Llama-3.1-405B-Instruct",
)
PRODUCTS = {
    "Tesla-T4": (1, 2, 4),
    "NVIDIA-L4": (1, 2, 4, 8),
    "NVIDIA-A10G": (1, 4),
    "NVIDIA-L40S": (1, 4, 8),
    "NVIDIA-A100-SXM4-40GB": (1, 8),
    "NVIDIA-A100-SXM4-80GB": (1, 2, 4, 8),
    "NVIDIA-H100-80GB-HBM3": (1, 2, 8),
}
DRAFT = {"source": {"huggingFace": {"repository": "Qwen/Qwen2.5-0.5B"}}}


@dataclass(frozen=True)
class Drawn:
    """An LLMDeployment and the nodes of its cluster."""

    number: int
    manifest: Manifest
    nodes: tuple[Manifest, ...]


def draw(seed: int) -> Iterator[Drawn]:
    """Yield specs without end."""
    dice, number = random.Random(seed), 0
    while True:
        number += 1
        nodes = tuple(_nodes(dice))
        spec = _on_cpu(dice) if dice.random() < 0.06 else _on_gpu(dice)
        yield Drawn(number, manifest(**spec), nodes)


def _nodes(dice: random.Random) -> Iterator[Manifest]:
    for number in range(dice.choice((1, 1, 2, 3))):
        product = dice.choice(sorted(PRODUCTS))
        taints = [{"key": "team", "value": "search", "effect": "NoSchedule"}] if dice.random() < 0.15 else []
        yield gpu_node(f"node-{number}", product, dice.choice(PRODUCTS[product]), taints=taints)


def _on_cpu(dice: random.Random) -> Manifest:
    """A model on a CPU with too little memory, beside an environment that an edit must not lose."""
    runtime = {"name": "runtime", "env": [{"name": "TZ", "value": "it's"}]}
    return _model(dice.choice(MODELS[:3])) | {
        "accelerator": {"type": "CPU"},
        "podTemplate": {"spec": {"containers": [runtime]}},
        "engine": {"maxModelLen": dice.choice((256, 4096))},
    }


def _on_gpu(dice: random.Random) -> Manifest:
    spec = _model(dice.choice(MODELS)) | {"accelerator": {"type": "GPU"}}
    for demand in dice.sample(DEMANDS, dice.choice((1, 1, 2, 3))):
        for field, value in demand(dice).items():
            spec[field] = {**spec[field], **value} if isinstance(value, dict) and field in spec else value
    return spec


def _model(repository: str) -> Manifest:
    return {"model": {"source": {"huggingFace": {"repository": repository}}}}


def _budget(dice: random.Random) -> Manifest:
    enforcement = {"enforcement": "Observe"} if dice.random() < 0.1 else {}
    return {"budget": {"maxMonthlyUSD": dice.choice((50, 400, 900, 2000, 6000)), **enforcement}}


def _load(dice: random.Random) -> Manifest:
    load = {"requestsPerMinute": dice.choice((300, 3000, 30000)), "concurrency": dice.choice((50, 500, 5000))}
    kept = dice.choice((["requestsPerMinute"], ["concurrency"], [*load]))
    return {"workload": {"profile": dice.choice(("Chat", "RAG", "Batch")), **{name: load[name] for name in kept}}}


def _objectives(dice: random.Random) -> Manifest:
    both = {"ttft": {"p95": dice.choice(("5ms", "60ms", "150ms"))}, "itl": {"p95": dice.choice(("2ms", "9ms", "25ms"))}}
    kept = dice.choice((["ttft"], ["itl"], [*both]))
    return {"objectives": {name: both[name] for name in kept}}


def _autoscaling(dice: random.Random) -> Manifest:
    """Replicas as an autoscaler wrote them, and a budget that may pay for fewer than its limits."""
    most = dice.choice((2, 8, 20))
    limits = {"maxReplicas": most, "minReplicas": dice.choice((1, 2, most))}
    return {"autoscaling": limits, "replicas": dice.choice((1, 2, most)), **_budget(dice)}


def _from_zero(dice: random.Random) -> Manifest:
    """Products of which most draws have no node: some hold the model as usual machines, some do not."""
    named = dice.sample(("T4", "L4", "L40S", "A100-40GB", "A100-80GB", "H100", "H200"), dice.choice((1, 2)))
    return {"accelerator": {"products": named}, **dice.choice((_budget, _load, _objectives))(dice)}


DEMANDS = (
    lambda dice: {"engine": {"maxModelLen": dice.choice((8192, 32768, 131072, 1_000_000))}},
    lambda dice: {"engine": {"maxNumBatchedTokens": dice.choice((65536, 262144)), "maxNumSeqs": 512}},
    lambda dice: {"engine": {"gpuMemoryUtilizationPercent": dice.choice((20, 45))}},
    lambda dice: {"replicas": dice.choice((2, 5, 40, 900))},
    lambda dice: {"tier": dice.choice(("Startup", "Mid"))},
    lambda dice: {"parallelism": {"tensor": dice.choice((1, 2, 3, 5, 16))}},
    lambda dice: {"parallelism": {"tensor": dice.choice((1, 2, 4, 8)), "pipeline": dice.choice((2, 3))}},
    lambda dice: {"quantization": {"method": dice.choice(("FP8", "AWQ", "INT8"))}},
    lambda dice: {"quantization": {"kvCache": "FP8"}},
    lambda dice: {"accelerator": {"products": [dice.choice(("T4", "H100", "MI300X", "A100-80GB", "B9999"))]}},
    lambda dice: {"speculation": {"method": "DraftModel", "draftModel": DRAFT}},
    _budget,
    _load,
    _objectives,
    _autoscaling,
    _from_zero,
)
