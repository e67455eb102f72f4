"""A GPU cluster with a model that reports what it measured."""

from __future__ import annotations

from typing import Any

from millstream_operator.facts.calibration_record import Entry, read_entries
from millstream_operator.kube.kinds import CONFIG_MAP, LLM_DEPLOYMENT
from millstream_operator.planning.calibration import CalibrationKey
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import FakeModel, FakeOperator, world
from tests.support.gpu_nodes import gpu_node, spec_on_gpu
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
SYSTEM, NAME = "millstream-system", "millstream-calibration"
# Of Llama-3.2-1B on an L4: 0.13 GB are predicted for CUDA graphs.
MEASURED = {
    "weights_bytes": 2_500_000_000,
    "activations_bytes": 400_000_000,
    "graphs_bytes": 443_000_000,
    "kv_cache_bytes": 15_000_000_000,
    "kv_cache_tokens": 450_000,
}
ENGINE = {"maxNumSeqs": 256, "maxModelLen": 8192}


def gpu_world(**spec: Any) -> FakeCluster:
    cluster = world(manifest(**spec_on_gpu(engine=ENGINE, **spec)))
    for number in range(4):
        cluster.put(gpu_node(f"node-{number}"))
    return cluster


def add(cluster: FakeCluster, name: str, **spec: Any) -> None:
    cluster.put(manifest(name=name, **spec_on_gpu(engine=ENGINE, **spec)))


async def measured(cluster: FakeCluster, **memory: int) -> FakeOperator:
    """An operator whose first model answered with these measurements."""
    model = FakeModel(cluster)
    model.ready = {"phase": "Ready", "memory": {**MEASURED, **memory}}
    operator = FakeOperator(cluster, model=model)
    await operator.settle()
    return operator


def entries(cluster: FakeCluster) -> dict[CalibrationKey, Entry]:
    return read_entries(cluster.get(CONFIG_MAP, NAME, SYSTEM))


def plan_of(cluster: FakeCluster, name: str) -> Manifest:
    found: Manifest = cluster.the(LLM_DEPLOYMENT, name)["status"]["plan"]
    return found
