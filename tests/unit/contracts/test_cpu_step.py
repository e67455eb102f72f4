"""The largest step that a plan for a CPU counts is the one that the runtime counts when it starts, and the KV pool that
the plan promises is one that the runtime takes and has the memory for. For every published model that it serves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from millstream_kernels.cpu.bfloat16 import check as bfloat16_check
from millstream_kernels.cpu.bfloat16.product import Bfloat16Product
from millstream_operator.catalog.model_shape import DraftHead, ModelShape
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.planning.choices.kv_layout import planned_cpu_memory
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.sizing import cpu_memory
from millstream_operator.planning.sizing.cpu_step import MASK_LIMIT_BYTES, StepLimits, draft_step_bytes, step_bytes
from millstream_operator.rendering.runtime_config import boot_config
from millstream_runtime.config import CAPABILITIES, DType, RuntimeConfig, SpeculationMethod
from millstream_runtime.draft_head_tensors import EAGLE1, EAGLE3
from millstream_runtime.engine.eagle import head_shard
from millstream_runtime.engine.execution import draft_shard, shard
from millstream_runtime.engine.execution.shard_config import ShardConfig, resolve_shard_config
from millstream_runtime.engine.execution.step_memory import worst_step_bytes
from millstream_runtime.engine.kv import pool_size
from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.registry import load_model_config
from tests.support.bfloat16_operations import ExactOperations
from tests.support.llmdeployments import deployment

SAMPLES = Path(__file__).resolve().parents[2] / "data" / "model_configs"
GIB, THREADS = 1 << 30, 16


def engine_bytes(shape: ModelShape) -> int:
    """Of the process that computes; the HTTP process is within the runtime's reserve."""
    return cpu_memory.process_bytes(shape) - pool_size.CPU_RESERVE_BYTES


def config_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SAMPLES / f"{name}.json").read_text(encoding="utf-8"))
    return found


NAMES = sorted(path.stem for path in SAMPLES.glob("*.json"))
SERVED = [name for name in NAMES if read_shape(config_of(name)).family in CAPABILITIES.model_families]
# A key of all heads (MLA), windows, experts without a dense layer, many heads, a large vocabulary.
OF_EACH_KIND = ["deepseek-v2-lite", "gemma-3-1b", "llama-3.2-1b", "mixtral-8x7b", "qwen3-30b-a3b"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For a config.json, on a machine with as many cores as the container's limit."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: THREADS)
    return tmp_path


def written(folder: Path, config: dict[str, Any]) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_shape(config)


def limits_of(max_model_len: int, kv_cache: str = "None", draft_tokens: int = 0) -> StepLimits:
    return StepLimits(
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        max_model_len=max_model_len,
        threads=THREADS,
        draft_tokens=draft_tokens,
        kv_cache=kv_cache,
    )


def is_covered(planned_bytes: int, counted_bytes: int) -> bool:
    """At most the masks of one layer more: a plan counts a window as one that is shorter than the context."""
    return counted_bytes <= planned_bytes <= counted_bytes + MASK_LIMIT_BYTES


def test_models_of_every_kind_are_compared() -> None:
    assert {*OF_EACH_KIND} <= {*SERVED}
    assert len(SERVED) >= 15


@pytest.mark.parametrize("name", SERVED)
def test_the_step_of_a_plan_is_that_of_the_runtime(name: str, folder: Path) -> None:
    shape = written(folder, config_of(name))
    config = load_model_config(folder)
    assert shape.max_position_embeddings == config.max_model_len
    for method in ("None", "INT8", "FP8"):
        for draft_tokens in (0, 5):
            limits = limits_of(config.max_model_len, method, draft_tokens)
            for longest in (1, 100, 3000, config.max_model_len):
                counted = worst_step_bytes(
                    config,
                    4,
                    num_tokens=2048,
                    num_rows=64 + min(64, 64 * draft_tokens),
                    longest_tokens=longest,
                    kv_method=method,
                )
                assert is_covered(step_bytes(shape, limits, longest), counted), (method, draft_tokens, longest)


@pytest.mark.parametrize("method", ["None", "INT8"])
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_a_step_over_a_pool_of_16_bits_is_followed(name: str, method: str, folder: Path) -> None:
    shape = written(folder, config_of(name))
    config = load_model_config(folder)
    limits = replace(limits_of(config.max_model_len, method), is_kv_narrow=True)
    for longest in (1, 3000, config.max_model_len):
        counted = worst_step_bytes(
            config, 4, num_tokens=2048, num_rows=64, longest_tokens=longest, kv_method=method, is_kv_widened=True
        )
        assert is_covered(step_bytes(shape, limits, longest), counted)


@pytest.mark.parametrize("tokens", [16, 512, 8192])
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_fewer_and_more_tokens_per_step_are_followed(name: str, tokens: int, folder: Path) -> None:
    shape = written(folder, config_of(name))
    config = load_model_config(folder)
    limits = replace(limits_of(config.max_model_len), max_num_batched_tokens=tokens, max_num_seqs=16)
    counted = worst_step_bytes(config, 4, num_tokens=tokens, num_rows=16, longest_tokens=4096)
    assert is_covered(step_bytes(shape, limits, 4096), counted)


@pytest.mark.parametrize("length", [1024, 8192])
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_the_pass_of_a_draft_model_is_that_of_the_runtime(name: str, length: int, folder: Path) -> None:
    shape = written(folder, config_of(name))
    target = replace(load_model_config(folder), max_model_len=length)
    runtime = RuntimeConfig(model=str(folder), served_model_name="draft")
    shard_config = ShardConfig(
        target, torch.device("cpu"), Arithmetic.of(torch.float32), resolve_shard_config(runtime).policy
    )
    of_draft = draft_shard.within_target(load_model_config(folder), shard_config)
    context_tokens = draft_shard.context_tokens(runtime, shard_config, of_draft)
    draft = draft_shard.DraftShard(folder, of_draft, context_tokens, 0, shard_config.arithmetic)
    counted = draft_shard.largest_step_bytes(runtime, shard_config, draft)
    assert is_covered(draft_step_bytes(shape, limits_of(length)), counted)


@pytest.mark.parametrize(("kind", "states"), [(EAGLE1, 1), (EAGLE3, 3)])
def test_the_pass_of_a_draft_head_is_that_of_the_runtime(kind: str, states: int, folder: Path) -> None:
    """A head has one layer of the shape of its config, and the target's vocabulary."""
    shape = written(folder, config_of("llama-2-7b"))
    runtime = RuntimeConfig(
        model=str(folder),
        served_model_name="head",
        speculation_method=SpeculationMethod.EAGLE,
        draft_model=str(folder),
    )
    shard_config = resolve_shard_config(
        replace(runtime, speculation_method=SpeculationMethod.DISABLED, draft_model=None)
    )
    found = shard_config.model_config
    of_head = cast(Any, None)  # what its pass takes needs its sizes alone
    numbers = Arithmetic.of(torch.float32)
    head = head_shard.HeadShard(folder, found, found.max_model_len, 0, numbers, of_head, tuple(range(states)))
    counted = head_shard.largest_step_bytes(runtime, shard_config, head)
    of_config = DraftHead(kind=kind, vocab_size=shape.vocab_size, target_hidden_size=shape.hidden_size, states=states)
    planned = draft_step_bytes(replace(shape, vocab_size=0, draft_head=of_config), limits_of(found.max_model_len))
    assert is_covered(planned, counted)


# Plans, and what the runtime makes of them


def decided(config: dict[str, Any], memory_bytes: int, **spec: Any) -> Plan | Infeasible:
    limited = [{"name": "runtime", "resources": {"limits": {"memory": f"{memory_bytes}"}}}]
    owner = deployment(podTemplate={"spec": {"containers": limited}}, **spec)
    return decide(owner, PlanDefaults("registry.example.com/runtime:1"), Facts(shape=read_shape(config)))


def least_plan(config: dict[str, Any], **spec: Any) -> Plan:
    """The plan in the smallest container that is not refused: that of the edit which a refused plan offers."""
    refused = decided(config, GIB, **spec)
    assert isinstance(refused, Infeasible)
    (offered,) = (int(fix.value.removesuffix("Gi")) for fix in refused.fixes if fix.field.endswith("limits.memory"))
    plan = decided(config, offered * GIB, **spec)
    assert isinstance(plan, Plan), plan.message
    return plan


def pool_of(
    plan: Plan, folder: Path, used_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[pool_size.MemoryBudget, int]:
    """What the runtime of a plan's pod has for its pool, and the pool that it takes."""
    assert plan.memory is not None
    limit_bytes = plan.memory.usable_bytes
    monkeypatch.setattr(shard, "memory_limit_bytes", lambda: limit_bytes)
    monkeypatch.setattr(shard, "container_limit_bytes", lambda: limit_bytes)
    monkeypatch.setattr(shard, "claimed_bytes", lambda: used_bytes)
    boot = RuntimeConfig.of(replace(boot_config(plan), model=str(folder)))
    runtime = replace(boot, auto_dtype=DType.FLOAT32)  # as `serve` reads a boot file
    shard_config = resolve_shard_config(runtime)
    monkeypatch.setattr(torch, "get_num_threads", lambda: THREADS)
    budget = shard.measure_memory(runtime, shard_config, cast(Decoder, None))
    found = shard.size_pool(runtime, shard_config, budget)
    config, layout = shard_config.model_config, shard.request_blocks(runtime, shard_config).layout
    number_bytes = shard_config.arithmetic.kv_cache.itemsize
    token_bytes = config.kv_bytes_per_token(number_bytes) // config.num_layers * layout.layers_per_group
    return budget, found.num_blocks * token_bytes * runtime.block_size_tokens


def on_a_cpu(monkeypatch: pytest.MonkeyPatch, *, multiplies_bfloat16: bool) -> None:
    """One kind of machine that a pod may meet, whichever this is."""
    product = Bfloat16Product(ExactOperations(), 1, 2) if multiplies_bfloat16 else None
    monkeypatch.setattr(bfloat16_check, "load", lambda: (product, None if product else "the CPU lacks it"))
    capability = "AVX512" if multiplies_bfloat16 else "AVX2"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)


LENGTHS: dict[str, dict[str, Any]] = {"full length": {}, "2048 tokens": {"engine": {"maxModelLen": 2048}}}


@pytest.mark.parametrize("spec", LENGTHS)
@pytest.mark.parametrize("name", SERVED)
def test_a_plan_promises_a_pool_that_its_container_holds_next_to_the_largest_step(
    name: str, spec: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the smallest container, and in larger ones, on either kind of CPU."""
    config = config_of(name)
    written(folder, config)
    least = least_plan(config, **LENGTHS[spec])
    assert least.memory is not None
    for percent in (100, 120, 200):
        plan = decided(config, least.memory.usable_bytes * percent // 100, **LENGTHS[spec])
        assert isinstance(plan, Plan), plan.message
        assert plan.memory is not None
        used_bytes = engine_bytes(read_shape(config)) + plan.memory.weights_bytes + plan.memory.embeddings_bytes
        for multiplies_bfloat16 in (False, True):
            on_a_cpu(monkeypatch, multiplies_bfloat16=multiplies_bfloat16)
            budget, pool_bytes = pool_of(plan, folder, used_bytes, monkeypatch)
            assert budget.activations_bytes is not None
            assert budget.activations_bytes <= plan.memory.activations_bytes
            assert budget.available_bytes >= plan.memory.kv_cache_bytes, "what is left holds what is promised"
            taken_bytes = used_bytes + pool_size.CPU_RESERVE_BYTES + budget.activations_bytes + pool_bytes
            assert taken_bytes <= plan.memory.usable_bytes


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_more_memory_makes_no_plan_worse(name: str) -> None:
    config, before = config_of(name), 0
    first = least_plan(config).memory
    assert first is not None
    for limit in range(first.usable_bytes, 2 * first.usable_bytes, GIB):
        plan = decided(config, limit)
        assert isinstance(plan, Plan), plan.message
        assert plan.memory is not None
        assert plan.memory.kv_cache_bytes >= before
        before = plan.memory.kv_cache_bytes


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_the_runtime_does_not_serve_yet_is_counted_too(name: str) -> None:
    shape, spec = read_shape(config_of(name)), deployment().spec
    ledger = planned_cpu_memory(spec, shape, Facts(shape=shape)).ledger
    assert ledger.activations_bytes >= 2048 * 4 * (8 * shape.hidden_size + 3 * max(shape.intermediate_sizes))


# Plans of earlier releases, which counted 256 MiB for the largest step of every model, and no margin


def request_bytes(shape: ModelShape, spec: str) -> int:
    """What a plan counts for the request that its pool must hold."""
    wanted = deployment(**LENGTHS[spec]).spec
    pool = planned_cpu_memory(wanted, shape, Facts(shape=shape)).pool
    return pool.bytes_for([(1, cpu_memory.shortest_length(wanted, shape))])


def earlier_limit_bytes(shape: ModelShape, need_bytes: int) -> int:
    """The least memory in which an earlier release planned a request of so many bytes."""
    used_bytes = cpu_memory.PROCESS_BYTES + cpu_memory.LEAST_STEP_BYTES + cpu_memory.cpu_weights_bytes(shape)
    return max(used_bytes + need_bytes, -(-need_bytes * 100 // cpu_memory.POOL_SHARE_PERCENT))


@pytest.mark.parametrize("spec", LENGTHS)
@pytest.mark.parametrize("name", SERVED)
def test_a_pod_of_an_earlier_plan_starts_where_the_step_leaves_too_little(
    name: str, spec: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has what one request needs, as it had before; the rest of the promise goes to the step."""
    shape = replace(written(folder, config_of(name)), dtype="FP32")
    need_bytes, block_bytes = request_bytes(shape, spec), 16 * shape.kv_elements_per_token() * 4
    limit = earlier_limit_bytes(shape, need_bytes + block_bytes)  # a pool is whole blocks
    plan = least_plan(config_of(name), **LENGTHS[spec])
    assert plan.memory is not None
    earlier = replace(
        plan, dtype="FP32", memory=replace(plan.memory, usable_bytes=limit), planned_model_len_tokens=None
    )
    _, pool_bytes = pool_of(earlier, folder, engine_bytes(shape) + cpu_memory.cpu_weights_bytes(shape), monkeypatch)
    assert pool_bytes >= need_bytes
