"""The KV memory that the planner counts for a model is what the engine allocates, also where layers mix windows, and
where keys and values are quantized."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kv_groups import SHAPES, running_at_once
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.catalog.gpu_names import parse_island
from millstream_operator.catalog.read_shape import read_shape, read_shape_file
from millstream_operator.inventory.node_kinds import inventory_of
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.spec_changes import without_unsupported
from millstream_operator.planning.plan import Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.sizing.cpu_memory import FLOAT32_BYTES
from millstream_operator.planning.sizing.kv_pool import KvPool, kv_pool
from millstream_operator.planning.sizing.memory_ledger import kv_bytes_per_token
from millstream_operator.rendering.runtime_config import boot_config
from millstream_runtime.config import CAPABILITIES, Device, DType, KVCacheDType, RuntimeConfig
from millstream_runtime.engine.execution import shard
from millstream_runtime.engine.execution.shard_config import resolve_shard_config
from millstream_runtime.engine.kv.pool_size import MemoryBudget
from millstream_runtime.engine.request import Request
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.arithmetic import Arithmetic
from tests.support.engines import greedy
from tests.support.family_cases import CASES, dense
from tests.support.llmdeployments import deployment
from tests.support.tiny_families import make_engine, write_family

pytestmark = pytest.mark.deep

LENGTH, CHUNK, WINDOW, REQUESTS = 2048, 128, 160, 4  # tokens, and requests at once
CATALOG = load_catalog()
SAMPLES = Path(__file__).resolve().parents[2] / "data" / "model_configs"


def hybrid(model_type: str, layers: int, **fields: Any) -> dict[str, Any]:
    """Small weights, and 512 bytes of keys and values per token and layer."""
    shape = {"num_hidden_layers": layers, "head_dim": 32, "max_position_embeddings": LENGTH, "sliding_window": WINDOW}
    return dense(model_type, **shape, **fields)


ALTERNATING = ["sliding_attention", "full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "gemma 2: every second layer": hybrid("gemma2", 6, query_pre_attn_scalar=32),
    "gemma 3: five of six, which do not divide": hybrid("gemma3_text", 13, query_pre_attn_scalar=32),
    "gpt-oss-like: a short window": hybrid("qwen2", 8, use_sliding_window=True, layer_types=ALTERNATING * 4)
    | {"sliding_window": 32},
    "phi 3: every layer": hybrid("phi3", 4),
    "llama: no layer": dense("llama", num_hidden_layers=4, head_dim=32, max_position_embeddings=LENGTH),
    "deepseek: no layer, a latent": CASES["deepseek-v2"].config
    | {"max_position_embeddings": LENGTH, "kv_lora_rank": 200},
}
MIXED = [name for name in MODELS if "every layer" not in name and "no layer" not in name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, config in MODELS.items():
        made[name] = tmp_path_factory.mktemp("kv")
        write_family(made[name], **config)
    return made


def planned(folder: Path, is_grouped: bool | None = None, kv_cache: str = "None") -> KvPool:
    """The planner's arithmetic for an engine with these limits, in float32 where `kv_cache` is None."""
    shape = read_shape_file(folder / "config.json")
    return kv_pool(
        shape,
        kv_bytes_per_token(shape, kv_cache, dtype_bytes=FLOAT32_BYTES),
        max_model_len=LENGTH,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=REQUESTS,
        is_grouped=is_grouped,
    )


SETTINGS = {"max_model_len": LENGTH, "max_num_batched_tokens": CHUNK, "max_num_seqs": REQUESTS}


@pytest.mark.parametrize("stored", KVCacheDType)
@pytest.mark.parametrize("name", MODELS)
def test_the_engine_allocates_what_was_planned(name: str, stored: KVCacheDType, folders: dict[str, Path]) -> None:
    """The memory that is planned for four requests holds them, and their tokens are counted alike."""
    pool = planned(folders[name], kv_cache=stored.method)
    pool_bytes = pool.bytes_for([(REQUESTS, LENGTH)])
    engine = make_engine(folders[name], kv_cache_memory_bytes=pool_bytes, kv_cache_dtype=stored, **SETTINGS)
    use = engine.memory_use
    assert (len(engine._blocks.windows) > 1) == (name in MIXED), "groups where they save memory, by default"
    assert use.kv_cache_bytes == pytest.approx(pool_bytes, rel=0.01)
    assert use.kv_cache_tokens == pytest.approx(pool.tokens(pool_bytes), rel=0.01)
    assert use.kv_cache_tokens == pytest.approx(REQUESTS * LENGTH, rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_one_request_fits_into_what_was_planned_for_it_and_not_into_less(name: str, folders: dict[str, Path]) -> None:
    need_bytes = planned(folders[name]).bytes_for([(1, LENGTH)])
    make_engine(folders[name], kv_cache_memory_bytes=need_bytes, **SETTINGS)
    with pytest.raises(RuntimeFailure) as caught:
        make_engine(folders[name], kv_cache_memory_bytes=need_bytes * 99 // 100, **SETTINGS)
    assert caught.value.reason is FailureReason.OUT_OF_MEMORY


@pytest.mark.parametrize("name", MIXED)
def test_a_running_request_holds_at_most_what_was_planned(name: str, folders: dict[str, Path]) -> None:
    pool = planned(folders[name])
    engine = make_engine(
        folders[name],
        kv_cache_memory_bytes=pool.bytes_for([(REQUESTS, LENGTH)]),
        enable_prefix_caching=False,
        **SETTINGS,
    )
    prompt = [1 + index % 60 for index in range(LENGTH - 8)]
    engine.add_request(Request("one", prompt, greedy(8)))
    most_blocks = 0
    while engine.has_work():
        engine.step()
        most_blocks = max(most_blocks, engine.stats().kv_blocks_used)
    most_bytes = most_blocks * pool.block_bytes
    need_bytes = pool.bytes_for([(1, LENGTH)])
    assert most_bytes <= need_bytes
    # Read between steps, when the window has passed what the step no longer needs.
    assert most_bytes >= 0.9 * need_bytes


PUBLISHED = ("gemma-2-27b", "gemma-3-1b", "llama-3.2-1b", "mistral-7b", "qwen2.5-7b")
FLAGS = {"Enabled": True, "Disabled": False, None: None}


@pytest.mark.parametrize("asked", FLAGS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_plan_for_a_gpu_promises_the_tokens_that_the_runtime_will_report(
    name: str, asked: str | None, tmp_path: Path
) -> None:
    config = json.loads((SAMPLES / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = decided(config, asked)
    assert plan.memory is not None
    assert plan.predicted is not None
    boot = replace(boot_config(plan), model=str(tmp_path), device=Device.CPU, dtype=DType.BFLOAT16)
    assert boot.enable_hybrid_kv_cache_manager is FLAGS[asked]
    # Where nothing is asked for, a GPU keeps one table, and a CPU, which computes here, chooses.
    runtime = RuntimeConfig.of(replace(boot, enable_hybrid_kv_cache_manager=FLAGS[asked] or False))
    # As a GPU does, which has one type for all.
    shard_config = replace(resolve_shard_config(runtime), arithmetic=Arithmetic.of(torch.bfloat16))
    budget = MemoryBudget(limit_bytes=0, used_bytes=0, reserve_bytes=0, available_bytes=plan.memory.kv_cache_bytes)
    found = shard.size_pool(runtime, shard_config, budget)
    held = shard.request_blocks(runtime, shard_config)
    tokens = held.tokens(found.num_blocks, found.max_model_len)
    assert tokens == pytest.approx(plan.predicted.kv_cache_tokens, rel=0.01)


def decided(
    config: dict[str, Any], asked: str | None, product: str = "A100-80GB", length: int = 8192, **facts: Any
) -> Plan:
    """The plan for one GPU and chunks of 2048 tokens."""
    engine: dict[str, Any] = {"maxModelLen": length, "maxNumBatchedTokens": 2048}
    engine |= {"hybridKvCacheManager": asked} if asked else {}
    owner = deployment(accelerator={"type": "GPU"}, engine=engine, parallelism={"tensor": 1})
    inventory = inventory_of([parse_island(CATALOG, f"{product}:1")])
    known = Facts(shape=read_shape(config), inventory=inventory, catalog=CATALOG)
    plan = decide(owner, PlanDefaults("registry.example.com/runtime:1"), replace(known, **facts))
    assert isinstance(plan, Plan), plan.message
    return plan


@pytest.mark.parametrize("kv_cache", ["INT8", "FP8"])
@pytest.mark.parametrize(
    ("name", "memory"), [("llama-3.2-1b", "12Gi"), ("gemma-3-1b", "8Gi"), ("deepseek-v2-lite", "96Gi")]
)
def test_a_plan_for_a_cpu_promises_the_tokens_of_a_quantized_pool(
    name: str, memory: str, kv_cache: str, tmp_path: Path
) -> None:
    config = json.loads((SAMPLES / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    limits = {"spec": {"containers": [{"name": "runtime", "resources": {"limits": {"memory": memory}}}]}}
    engine = {"maxModelLen": 8192}
    plans = []
    for asked in ("None", kv_cache):
        owner = deployment(engine=engine, podTemplate=limits, quantization={"kvCache": asked})
        plan = decide(owner, PlanDefaults("registry.example.com/runtime:1"), Facts(shape=read_shape(config)))
        assert isinstance(plan, Plan), plan.message
        assert not plan.requires
        plans.append(plan)
    plain, quantized = plans
    assert plain.memory is not None
    assert quantized.memory is not None
    assert plain.memory.kv_cache_bytes == quantized.memory.kv_cache_bytes
    assert plain.memory.activations_bytes < quantized.memory.activations_bytes, "a step dequantizes a layer's context"
    tokens = [_promised_tokens(plan) for plan in plans]
    assert tokens[1] > 3.7 * tokens[0], "32 bits become 8 and a scale"
    runtime = RuntimeConfig.of(replace(boot_config(quantized), model=str(tmp_path)))
    assert runtime.kv_cache_dtype.method == kv_cache
    shard_config = resolve_shard_config(runtime)
    budget = MemoryBudget(limit_bytes=0, used_bytes=0, reserve_bytes=0, available_bytes=quantized.memory.kv_cache_bytes)
    found = shard.size_pool(runtime, shard_config, budget)
    held = shard.request_blocks(runtime, shard_config)
    assert held.tokens(found.num_blocks, found.max_model_len) == pytest.approx(tokens[1], rel=0.01)


def _promised_tokens(plan: Plan) -> int:
    [words] = [one.reason for one in plan.reasons if one.field == "memory"]
    return int(words.split(" tokens")[0].rsplit(" ", 1)[1].replace(",", ""))


def planned_on_a_gpu(kv_cache: str, gpu: str, **facts: Any) -> tuple[LLMDeployment, Facts, Plan]:
    config = json.loads((SAMPLES / "llama-3.2-1b.json").read_text())
    owner = deployment(accelerator={"type": "GPU"}, parallelism={"tensor": 1}, quantization={"kvCache": kv_cache})
    inventory = inventory_of([parse_island(CATALOG, f"{gpu}:1")])
    known = Facts(shape=read_shape(config), inventory=inventory, catalog=CATALOG, **facts)
    plan = decide(owner, PlanDefaults("registry.example.com/runtime:1"), known)
    assert isinstance(plan, Plan), plan.message
    return owner, known, plan


@pytest.mark.parametrize("gpu", ["H100-80GB", "A100-40GB"])
@pytest.mark.parametrize(("kv_cache", "least"), [("INT8", 1.9), ("FP8", 2.0)])
def test_a_gpu_is_planned_with_more_tokens_and_its_pods_get_the_format(kv_cache: str, least: float, gpu: str) -> None:
    """A100: FP8 needs no GPU that computes in it."""
    plain, quantized = (planned_on_a_gpu(asked, gpu)[2] for asked in ("None", kv_cache))
    assert plain.predicted is not None
    assert quantized.predicted is not None
    assert quantized.requires == ()
    assert quantized.predicted.kv_cache_tokens > 0.99 * least * plain.predicted.kv_cache_tokens
    assert boot_config(quantized).kv_cache_dtype.value == kv_cache.lower()
    assert "kv_cache_dtype" not in boot_config(plain).as_dict(), "pods that run have no such field"


@pytest.mark.parametrize("kv_cache", ["INT8", "FP8"])
def test_a_runtime_without_quantized_pools_is_refused_by_name_and_the_fix_leaves_it_out(kv_cache: str) -> None:
    old = replace(CAPABILITIES, kv_cache_methods=frozenset({"None"}))
    owner, facts, plan = planned_on_a_gpu(kv_cache, "H100-80GB", runtime=old, choosable=old)
    assert plan.requires == (f"kvCache={kv_cache}",)
    change = without_unsupported(owner, facts)
    assert change is not None
    assert change.deployment.spec.quantization is None or change.deployment.spec.quantization.kv_cache is None


def test_a_plan_promises_the_requests_that_the_scheduler_admits() -> None:
    """Gemma 3 1B, requests of 8,192 tokens, 16 GiB: the engine's own scheduler runs as many at once."""
    config = json.loads((SAMPLES / "gemma-3-1b.json").read_text())
    shape, benchmark = read_shape(config), SHAPES["gemma-3-1b"]
    pool = kv_pool(
        shape,
        shape.kv_elements_per_token() * 2,
        max_model_len=8193,
        max_num_batched_tokens=2048,
        max_num_seqs=512,
        is_grouped=True,
    )
    assert (*shape.windows,) == (*sorted(benchmark.windows, key=lambda one: one is None),)
    assert pool.blocks is not None
    running = running_at_once(benchmark, pool.blocks.layout, 8192)
    assert running == pytest.approx(pool.requests(16 << 30, 8192), rel=0.01)


def test_groups_hold_more_requests_and_more_tokens_in_a_plan() -> None:
    config = json.loads((SAMPLES / "gemma-3-1b.json").read_text())
    before, after = (decided(config, asked, "L4", 32768) for asked in ("Disabled", "Enabled"))
    assert before.predicted is not None
    assert after.predicted is not None
    assert after.memory == before.memory
    assert after.predicted.kv_cache_tokens > 2 * before.predicted.kv_cache_tokens


def test_a_runtime_without_groups_is_planned_with_one_block_table() -> None:
    config = json.loads((SAMPLES / "gemma-3-1b.json").read_text())
    old = replace(CAPABILITIES, kv_layouts=frozenset({"OneTable"}))
    expected = decided(config, None)
    assert decided(config, None, runtime=old, choosable=old).predicted == expected.predicted
    asked = decided(config, "Enabled", runtime=old, choosable=old)
    assert asked.predicted == expected.predicted
    assert asked.requires == ("kvLayout=TablePerGroup",), "and a wish for groups is refused by name"
    refused = decided(config, "Disabled", runtime=old, choosable=old)
    assert boot_config(refused).enable_hybrid_kv_cache_manager is None, "it would refuse a flag that it does not know"
