"""What holds for every plan, whatever the model, the GPU and the limits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.catalog.gpu import GpuPart, load_catalog
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.inventory.node_kinds import Inventory, NodeKind, inventory_of
from millstream_operator.planning.facts import EVERYTHING, Facts
from millstream_operator.planning.plan import MAX_FIXES, Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.sizing.memory_ledger import MemoryLedger, activations_bytes, gpu_ledger
from millstream_operator.planning.sizing.tensor_parallel import tensor_parallel_problem
from millstream_operator.planning.sizing.weights import rank_weights, weight_format
from tests.support.known_models import known_repositories

pytestmark = pytest.mark.deep

CATALOG = load_catalog()
PARTS = [part for part in CATALOG if part.unsupported is None]
SHAPES = [shape for name in known_repositories() if (shape := known_shape(name)) is not None]
METHODS = ["None", "AWQ", "GPTQ", "FP8", "INT8", "NF4", "RTN", "GGUF"]

shapes, parts = st.sampled_from(SHAPES), st.sampled_from(PARTS)


def deployment(spec: dict[str, object]) -> LLMDeployment:
    source = {"source": {"huggingFace": {"repository": "org/name"}}}
    manifest = {
        "apiVersion": "millstream.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "any"},
        "spec": {"model": source, **spec},
    }
    return LLMDeployment.model_validate_json(json.dumps(manifest))


specs = st.fixed_dictionaries(
    {},
    optional={
        "tier": st.sampled_from(["Startup", "Mid", "Enterprise"]),
        "workload": st.fixed_dictionaries(
            {"profile": st.sampled_from(["Chat", "RAG", "Code", "Math", "Creative", "Batch", "Edge"])}
        ),
        "engine": st.fixed_dictionaries({"maxModelLen": st.integers(128, 8192), "maxNumSeqs": st.integers(1, 512)}),
        "quantization": st.fixed_dictionaries({"kvCache": st.sampled_from(["Auto", "None", "FP8", "INT8"])}),
        "parallelism": st.fixed_dictionaries({"tensor": st.integers(1, 8)}),
        "speculation": st.fixed_dictionaries({"method": st.sampled_from(["Auto", "NGram", "EAGLE", "Medusa"])}),
    },
)


def facts(shape: ModelShape, *kinds: NodeKind) -> Facts:
    return Facts(shape=shape, inventory=Inventory(kinds), catalog=CATALOG, choosable=EVERYTHING)


def made(spec: dict[str, object], known: Facts) -> Plan | Infeasible:
    return decide(deployment(spec), PlanDefaults("image"), known)


def parts_bytes(ledger: MemoryLedger) -> int:
    """Sum all parts of a ledger."""
    return sum(value for name, value in ledger.as_dict().items() if name != "usableBytes")


@given(
    shapes,
    parts,
    st.sampled_from(METHODS),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 4),
    st.integers(1, 99),
    st.integers(16, 1 << 17),
)
def test_the_parts_of_a_ledger_add_up_to_the_whole(
    shape: ModelShape, part: GpuPart, method: str, tensor: int, pipeline: int, utilization: int, tokens: int
) -> None:
    stored = weight_format(shape, method)
    assume(tensor_parallel_problem(shape, tensor, stored.group_size) is None)  # no other size is ever planned
    weights = rank_weights(shape, stored, tensor, pipeline)
    activations = activations_bytes(shape, stored, tensor=tensor, max_num_batched_tokens=tokens, max_num_seqs=16)
    ledger = gpu_ledger(part, utilization, shape, weights, activations, ranks=tensor * pipeline)
    assert parts_bytes(ledger) == ledger.usable_bytes == part.usable_memory_bytes
    assert min(value for key, value in ledger.as_dict().items() if key != "kvCacheBytes") >= 0
    # Every rank together holds the model at least once.
    whole = rank_weights(shape, stored)
    assert weights.total_bytes * tensor * pipeline >= whole.total_bytes * 0.999


@settings(max_examples=60, deadline=None)
@given(specs, shapes, parts, st.integers(1, 8), st.integers(1, 3))
def test_a_plan_is_valid_and_fits(
    spec: dict[str, object], shape: ModelShape, part: GpuPart, gpus: int, nodes: int
) -> None:
    kind = NodeKind(part, gpus, nodes)
    plan = made(spec, facts(shape, kind))
    if isinstance(plan, Infeasible):
        assert plan.message
        assert len(plan.fixes) <= MAX_FIXES
        return
    group = weight_format(shape, plan.quantization).group_size
    assert tensor_parallel_problem(shape, plan.tensor_parallel_size, group) is None
    assert plan.gpus_per_replica == plan.tensor_parallel_size * plan.pipeline_parallel_size <= gpus * nodes
    assert plan.tensor_parallel_size <= gpus
    assert plan.memory is not None
    assert plan.predicted is not None
    assert parts_bytes(plan.memory) == plan.memory.usable_bytes
    assert plan.predicted.kv_cache_tokens >= (plan.engine.max_model_len_tokens or 0)
    assert plan.engine.max_num_batched_tokens >= plan.engine.max_num_seqs
    json.dumps(plan.status_plan())


@settings(max_examples=60, deadline=None)
@given(specs, shapes, parts, st.integers(1, 8), st.floats(1.0, 4.0))
def test_more_memory_never_makes_a_spec_infeasible(
    spec: dict[str, object], shape: ModelShape, part: GpuPart, gpus: int, factor: float
) -> None:
    larger = part.model_copy(update={"usable_memory_bytes": int(part.usable_memory_bytes * factor)})
    small = made(spec, facts(shape, NodeKind(part, gpus, 1)))
    if isinstance(small, Plan):
        large = made(spec, facts(shape, NodeKind(larger, gpus, 1)))
        assert isinstance(large, Plan)
        assert large.gpus_per_replica <= small.gpus_per_replica


@settings(max_examples=30, deadline=None)
@given(specs, shapes, st.lists(st.tuples(parts, st.integers(1, 8)), min_size=1, max_size=6))
def test_the_order_of_nodes_decides_nothing(
    spec: dict[str, object], shape: ModelShape, nodes: list[tuple[GpuPart, int]]
) -> None:
    known = facts(shape)
    shuffled = nodes[::-1]
    first = made(spec, replace(known, inventory=inventory_of(nodes)))
    second = made(spec, replace(known, inventory=inventory_of(shuffled)))
    assert first.status_plan() == second.status_plan()
