"""The checkpoint's own format decides, on a CPU too, and a tensor-parallel size never cuts its blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millstream_operator.api.load import parse
from millstream_operator.catalog.checkpoint_quantization import CheckpointQuantization
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.sizing.tensor_parallel import tensor_parallel_problem
from tests.support.llmdeployments import manifest
from tests.unit.operator.catalog.test_config_ranges import config

DEFAULTS = PlanDefaults("registry.example.com/millstream-runtime:1.0")
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
BIG = {"resources": {"limits": {"memory": "64Gi"}}}


def on_cpu(shape: ModelShape, **spec: Any) -> Plan | Infeasible:
    pod = {"spec": {"containers": [{"name": "runtime", **BIG}]}}
    deployment = parse(manifest(accelerator={"type": "CPU"}, podTemplate=pod, **spec))
    return decide(deployment, DEFAULTS, Facts(shape=shape))


def llama_8b(method: str | None = None) -> ModelShape:
    shape = known_shape("meta-llama/Meta-Llama-3-8B")
    assert shape is not None
    return replace(shape, quantization=CheckpointQuantization(method, 4, 128) if method else None)


@pytest.mark.parametrize(("method", "lacks"), [("AWQ", ()), ("NF4", ()), ("RTN", ("quantization=RTN",))])
def test_a_cpu_plan_has_the_checkpoints_format_and_says_what_the_runtime_lacks(method: str, lacks: object) -> None:
    plan = on_cpu(llama_8b(method))
    assert isinstance(plan, Plan)
    assert (plan.summary, plan.quantization, plan.requires) == (f"CPU TP1 {method}", method, lacks)
    assert any(f"The checkpoint's own quantization_config: {method}, 4 bit" in one.reason for one in plan.reasons)


def test_a_cpu_plan_says_which_setting_of_a_checkpoint_the_runtime_does_not_read() -> None:
    three_bits = {"quant_method": "gptq", "bits": 3, "group_size": 128}
    plan = on_cpu(read_shape(config("llama-3-70b", quantization_config=three_bits)))
    assert "checkpointFormat=quantization_config.bits 3" in str(plan.requires)


def test_a_packed_model_needs_the_memory_of_its_packed_weights() -> None:
    """8 billion weights in BF16 need 16 GB, and in AWQ some 6: of these 2 are embeddings and head in BF16. The step
    takes another one."""
    plans = on_cpu(llama_8b()), on_cpu(llama_8b("AWQ"))
    plain, packed = (plan.resources.requests["memory"] for plan in plans if isinstance(plan, Plan))
    assert 16_000 < int(plain.removesuffix("Mi")) < 18_500
    assert 6_500 < int(packed.removesuffix("Mi")) < 8_000


def test_a_cpu_plan_of_a_plain_checkpoint_names_its_dtype() -> None:
    plan = on_cpu(llama_8b())
    assert isinstance(plan, Plan)
    assert (plan.summary, plan.quantization, plan.requires) == ("CPU TP1 BF16", "None", ())


@pytest.mark.parametrize("asked", ["None", "GPTQ"])
def test_a_method_that_contradicts_the_checkpoint_is_refused_on_a_cpu_too(asked: str) -> None:
    found = on_cpu(llama_8b("AWQ"), quantization={"method": asked})
    assert isinstance(found, Infeasible)
    assert found.message.startswith(f"spec.quantization.method is {asked}, but the checkpoint is stored as AWQ.")
    assert "quantization.method" in str(found.fixes), "without the field it is served"


@pytest.mark.parametrize(
    ("name", "allowed", "refused", "why"),
    [
        ("qwen3-30b-a3b", (1, 2), 4, "a shard of 192 columns (768 over 4 GPUs) cuts the blocks of 128 × 128 weights"),
        ("deepseek-v3", (1, 2, 4, 8, 16), 32, "a shard of 64 columns (2048 over 32 GPUs) cuts the blocks"),
        ("llama-3-70b", (1, 2, 4, 8), 64, "a shard of 448 columns (28672 over 64 GPUs) cuts the blocks"),
    ],
)
def test_a_block_of_block_fp8_is_never_cut(name: str, allowed: tuple[int, ...], refused: int, why: str) -> None:
    shape = read_shape(config(name, quantization_config=BLOCKS))
    assert [tensor_parallel_problem(shape, size) for size in allowed] == [None] * len(allowed)
    assert why in str(tensor_parallel_problem(shape, refused))
    plain = read_shape(config(name))
    assert tensor_parallel_problem(plain, refused) is None
