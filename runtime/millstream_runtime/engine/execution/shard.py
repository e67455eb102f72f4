"""One rank's share of a deployment: where it computes, its part of the weights, and what memory is left for its pool.

With one rank that is all of it. Every rank runs this same code over the same configuration; only rank 0 decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from millstream_runtime.config import DType, KVCacheDType, RuntimeConfig
from millstream_runtime.engine.attention import varlen_attention
from millstream_runtime.engine.execution.forward import Forward
from millstream_runtime.engine.execution.graphs.buckets import Bucket, Buckets
from millstream_runtime.engine.execution.graphs.graph_budget import buckets_within, estimate_bytes
from millstream_runtime.engine.execution.graphs.graphed_decodes import GraphedDecodes, GraphPlan
from millstream_runtime.engine.execution.graphs.recorders import Recorder
from millstream_runtime.engine.execution.graphs.static_decode import StaticDecode
from millstream_runtime.engine.execution.kernel_choice import ATTENTION_PARTS, backend_of
from millstream_runtime.engine.execution.shard_config import ShardConfig
from millstream_runtime.engine.execution.step_input import BlockRun, ChunkInput, StepInput
from millstream_runtime.engine.execution.step_memory import worst_step_bytes
from millstream_runtime.engine.host_limits import claimed_bytes, container_limit_bytes, memory_limit_bytes
from millstream_runtime.engine.kernel_backends import Backend, KernelChoice
from millstream_runtime.engine.kv import pool_size
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.out_of_memory import is_out_of_memory
from millstream_runtime.engine.sampling.largest_sample import sample_largest
from millstream_runtime.engine.scheduling.step_plan import MOST_STEP_DRAFTS
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.kv_formats import dequantizing_bytes, kv_token_bytes
from millstream_runtime.kv_layout import RequestBlocks, choose_layout
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.linear.shares import RankInfo, rank_config
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS, Ranks
from millstream_runtime.models.loading.kv_scales import read_kv_scales
from millstream_runtime.models.loading.layer_kernels import LayerKernels
from millstream_runtime.models.registry import OnRead, expected_weights, load_model

PROFILED_LAYERS = 8  # enough for each kind: families that mix windows and experts do so within a few layers


def load(
    config: RuntimeConfig,
    shard_config: ShardConfig,
    ranks: Ranks = SINGLE_PROCESS,
    on_read: OnRead | None = None,
    kernels: LayerKernels | None = None,
) -> Decoder:
    """Load this rank's weights onto its device. `kernels`: what computes norms, gates and packed linears.

    Raises:
        RuntimeFailure: OutOfMemory, CheckpointInvalid, or InvalidConfig where the model cannot be shared so.
    """
    arithmetic, device = shard_config.arithmetic, shard_config.device
    weight_bytes = expected_weights(shard_config.model_config, arithmetic, ranks).num_bytes
    limit_bytes = memory_limit_bytes() // ranks.size if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    whose = "" if ranks.size == 1 else f" on each of {ranks.size} ranks"
    too_large = RuntimeFailure(
        FailureReason.OUT_OF_MEMORY,
        f"The weights of {config.model} need {pool_size.gibibytes(weight_bytes)}{whose} as "
        f"{str(arithmetic.weights).removeprefix('torch.')}, but {pool_size.gibibytes(limit_bytes)} of memory is "
        "usable; give more memory or a smaller dtype.",
    )
    if weight_bytes > limit_bytes:
        raise too_large
    copy_budget_bytes = 0
    if device.type == "cpu":
        used_bytes = claimed_bytes()
        step_bytes = step_reserve_bytes(config, shard_config, ranks, limit_bytes, used_bytes + weight_bytes)
        copy_budget_bytes = pool_size.copy_budget_bytes(limit_bytes, used_bytes, weight_bytes, step_bytes)
    try:
        return load_model(
            shard_config.model_config,
            Path(config.model),
            arithmetic,
            device,
            ranks,
            on_read,
            copy_budget_bytes,
            kernels,
            may_round_activations=config.dtype is not DType.FLOAT32,
            code=shard_config.policy.compiled_code,
            product=shard_config.policy.bfloat16_product if arithmetic.rounds_products else None,
        )
    except torch.OutOfMemoryError:
        raise too_large from None
    except (MemoryError, RuntimeError) as error:  # a CPU's allocator
        if not is_out_of_memory(error):
            raise
        raise RuntimeFailure(
            FailureReason.OUT_OF_MEMORY,
            f"Memory ran out while the weights of {config.model} were read: they need "
            f"{pool_size.gibibytes(weight_bytes)}{whose} as {str(arithmetic.weights).removeprefix('torch.')}, more for "
            f"one layer while it is packed, and {pool_size.gibibytes(limit_bytes)} is the limit of the whole process; "
            "give more memory or a smaller model.",
        ) from None


def request_blocks(config: RuntimeConfig, shard_config: ShardConfig) -> RequestBlocks:
    """Return which layers share a block table, and what a request takes of the pool.

    Without a wish of the configuration there are groups where they save memory, on a CPU alone: no GPU has run them.
    A draft model would waste the blocks of all groups but one, so with it there are none.
    """
    model, is_grouped = shard_config.model_config, config.enable_hybrid_kv_cache_manager
    if is_grouped is None and (shard_config.device.type != "cpu" or config.draft_model is not None):
        is_grouped = False
    layout = choose_layout(
        model.windows,
        model.num_layers,
        max_model_len=model.max_model_len,
        block_size_tokens=config.block_size_tokens,
        max_num_batched_tokens=config.max_num_batched_tokens,
        is_grouped=is_grouped,
    )
    return RequestBlocks(layout, config.block_size_tokens, config.max_num_batched_tokens)


def make_kv_cache(
    config: RuntimeConfig,
    shard_config: ShardConfig,
    num_blocks: int,
    ranks: RankInfo = SINGLE_PROCESS,
    *,
    num_padding_blocks: int = 0,
) -> KVCache:
    """Allocate this rank's part of the KV pool: all blocks, its heads.

    Raises:
        RuntimeFailure: CheckpointInvalid, a scale of an FP8 cache is no scale.
    """
    is_fp8 = config.kv_cache_dtype is KVCacheDType.FP8
    shape = rank_config(shard_config.model_config, ranks)
    return KVCache(
        shape,
        num_blocks,
        config.block_size_tokens,
        shard_config.dtype,
        shard_config.device,
        layout=request_blocks(config, shard_config).layout,
        num_padding_blocks=num_padding_blocks,
        zeros=shard_config.policy.zeros,
        stored=config.kv_cache_dtype,
        plain_dtype=shard_config.arithmetic.kv_cache,
        fp8_scales=read_kv_scales(Path(config.model), shape.num_layers) if is_fp8 else (),
    )


def measure_memory(
    config: RuntimeConfig,
    shard_config: ShardConfig,
    model: Decoder,
    ranks: RankInfo = SINGLE_PROCESS,
    *,
    with_graphs: bool = False,
    kernels: Sequence[KernelChoice] = (),
    draft_step_bytes: int = 0,
) -> pool_size.MemoryBudget:
    """Return what this rank's pool may take beside the largest step: `max_num_batched_tokens` behind the longest
    context. On CUDA all ranks compute that step together; on a CPU, where it takes minutes, it is counted.

    `with_graphs`: keep memory for CUDA graphs, which are recorded once the pool is there. `kernels`: what computes the
    parts of a step. `draft_step_bytes`: of a draft model's largest pass, which comes before a step.
    """
    if shard_config.device.type == "cpu":
        return _cpu_budget(config, shard_config, ranks, draft_step_bytes)
    return _cuda_budget(config, shard_config, model, ranks, kernels, with_graphs=with_graphs)


def plan_graphs(
    config: RuntimeConfig, model: Decoder, cache: KVCache, max_model_len: int, backend: Backend = Backend.TORCH
) -> GraphPlan | None:
    """Return which buckets rank 0 may have recorded; None where no padded step is small enough.

    `backend`: what computes the attention of these steps.
    """
    device = cache.heads[0].device
    on_cuda = device.type == "cuda"
    total_bytes = torch.cuda.mem_get_info(device)[1] if on_cuda else memory_limit_bytes()
    limit_bytes = total_bytes * config.gpu_memory_utilization_percent // 100
    copied_bytes = cache.copied_token_bytes * config.block_size_tokens * model.config.num_layers
    block_bytes = _padded_step_bytes(config, model.config, copied_bytes, backend)
    in_place = backend is Backend.TORCH and varlen_attention.can_serve(model.config, cache.heads[0])
    buckets = _buckets(config, model.config, block_bytes, max_model_len, limit_bytes, in_place=in_place)
    if buckets.largest is None:
        return None
    budget = estimate_bytes(buckets, block_bytes=block_bytes, num_layers=model.config.num_layers) if on_cuda else None
    return GraphPlan(buckets, cache.block_size_tokens, budget)


def graphed_decodes(
    model: Decoder,
    cache: KVCache,
    buckets: Sequence[Bucket],
    recorder: Recorder,
    backend: Backend,
    ranks: RankInfo = SINGLE_PROCESS,
    *,
    num_rows: int,
) -> GraphedDecodes:
    """Return what replays steps on this rank, with nothing recorded. `buckets`: all that may be recorded; `num_rows`:
    of the batch."""
    decode = StaticDecode(model, cache, buckets, backend, num_rows)
    return GraphedDecodes(decode, recorder, is_only_rank=ranks.size == 1)


def memory_use(
    config: RuntimeConfig,
    model: Decoder,
    cache: KVCache,
    pool: pool_size.PoolSize,
    budget: pool_size.MemoryBudget,
    graphs_bytes: int = 0,
) -> pool_size.MemoryUse:
    """Return what this rank has taken, as far as measured. `graphs_bytes`: of the graphs recorded so far."""
    held = RequestBlocks(cache.layout, config.block_size_tokens, config.max_num_batched_tokens)
    return pool_size.MemoryUse(
        weights_bytes=model.weight_bytes,
        activations_bytes=budget.activations_bytes,
        graphs_bytes=graphs_bytes,
        kv_cache_bytes=cache.num_bytes,
        kv_cache_tokens=held.tokens(cache.num_blocks, pool.max_model_len),
    )


def size_pool(
    config: RuntimeConfig,
    shard_config: ShardConfig,
    budget: pool_size.MemoryBudget,
    ranks: RankInfo = SINGLE_PROCESS,
    draft_token_bytes: int = 0,
) -> pool_size.PoolSize:
    """Return the blocks of the pool, the same number on every rank: `budget` is the smallest among the ranks.

    `draft_token_bytes`: what a draft model's pool, which has as many blocks, keeps of a token.

    Raises:
        RuntimeFailure: OutOfMemory, with the budget.
    """
    shape = rank_config(shard_config.model_config, ranks)
    held = request_blocks(config, shard_config)
    layer_token_bytes = _layer_token_bytes(config, shape, shard_config.arithmetic.kv_cache)
    asked_bytes = config.kv_cache_memory_bytes
    return pool_size.size_pool(
        budget,
        asked_bytes=None if asked_bytes is None else asked_bytes // ranks.size,
        block_bytes=(layer_token_bytes * held.layout.layers_per_group + draft_token_bytes) * config.block_size_tokens,
        block_size_tokens=config.block_size_tokens,
        max_model_len=shard_config.model_config.max_model_len,
        max_model_len_is_explicit=config.max_model_len is not None,
        max_num_seqs=config.max_num_seqs,
        blocks_for=held.most,
        planned_model_len=config.planned_model_len,
    )


def _layer_token_bytes(config: RuntimeConfig, shape: ModelConfig, plain_dtype: torch.dtype) -> int:
    """What one token keeps in one layer of this rank's pool. `plain_dtype`: of numbers that are not quantized."""
    return kv_token_bytes(config.kv_cache_dtype.method, *shape.kv_shape, plain_dtype.itemsize)


def step_reserve_bytes(
    config: RuntimeConfig, shard_config: ShardConfig, ranks: RankInfo, limit_bytes: int, used_bytes: int
) -> int:
    """Return what this rank keeps free for its steps on a CPU: nothing of a machine's memory, of which the pool takes a
    share. `used_bytes`: by the process and its weights."""
    if container_limit_bytes() is None:
        return 0
    step_bytes = _cpu_step_bytes(config, shard_config, ranks, limit_bytes - used_bytes)
    return pool_size.step_reserve_bytes(limit_bytes, step_bytes)


def _cpu_budget(
    config: RuntimeConfig, shard_config: ShardConfig, ranks: RankInfo, draft_step_bytes: int
) -> pool_size.MemoryBudget:
    limit_bytes, used_bytes = memory_limit_bytes() // ranks.size, claimed_bytes()
    step_bytes = max(_cpu_step_bytes(config, shard_config, ranks, limit_bytes - used_bytes), draft_step_bytes)
    is_container = container_limit_bytes() is not None
    return pool_size.cpu_budget(limit_bytes, used_bytes, step_bytes, is_container=is_container)


def _cpu_step_bytes(config: RuntimeConfig, shard_config: ShardConfig, ranks: RankInfo, free_bytes: int) -> int:
    """Return the bytes of the largest step, with contexts as long as `free_bytes` hold."""
    shape = rank_config(shard_config.model_config, ranks)
    token_bytes = _layer_token_bytes(config, shape, shard_config.arithmetic.kv_cache) * shape.num_layers
    return worst_step_bytes(
        shape,
        shard_config.dtype.itemsize,
        num_tokens=config.max_num_batched_tokens,
        num_rows=sampled_rows(config),
        longest_tokens=min(shape.max_model_len, max(1, free_bytes // token_bytes)),
        kv_method=config.kv_cache_dtype.method,
        is_kv_widened=shard_config.arithmetic.kv_cache is not shard_config.dtype,
        has_trees=config.tree is not None,
    )


def _cuda_budget(
    config: RuntimeConfig,
    shard_config: ShardConfig,
    model: Decoder,
    ranks: RankInfo,
    kernels: Sequence[KernelChoice],
    *,
    with_graphs: bool,
) -> pool_size.MemoryBudget:
    """Measure the largest step on a throw-away pool, then count what is left."""
    device = shard_config.device
    cache = make_kv_cache(config, shard_config, 1, ranks)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    eager, static = (backend_of(part, tuple(kernels)) for part in ATTENTION_PARTS)
    forward = Forward(model, cache, shard_config.policy, backend=eager)
    compute_largest_step(config, shard_config.model_config.max_model_len, forward)
    torch.cuda.synchronize(device)
    activation_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
    del cache, forward
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    limit_bytes = total_bytes * config.gpu_memory_utilization_percent // 100
    used_bytes = total_bytes - free_bytes
    graphs_bytes = _graphs_estimate_bytes(config, shard_config, ranks, limit_bytes, static) if with_graphs else 0
    return pool_size.cuda_budget(limit_bytes, used_bytes, activation_bytes, graphs_bytes)


@torch.inference_mode()
def compute_largest_step(config: RuntimeConfig, max_model_len: int, forward: Forward) -> None:
    """Compute `max_num_batched_tokens` of prompts whose context is `max_model_len`, in scattered blocks.

    A context takes no pool for it: every block of every table is block 0. The layers at the end of the context cost
    seconds, and any of a kind takes the same memory, so only PROFILED_LAYERS are computed there; all layers are
    computed for prompts without a context. Then a token of as many rows as a step may have is sampled, where the logits
    are: on rank 0.
    """
    step = step_of_prompts(config, config.max_num_batched_tokens, max_model_len, forward.num_groups)
    chunks = [
        _scattered_chunk(one.num_tokens, max_model_len, config.block_size_tokens, forward.num_groups)
        for one in step.chunks
    ]
    forward.compute_first_layers(step.token_ids, chunks, PROFILED_LAYERS)
    logits = forward.logits(forward.residual(step), range(min(len(step.token_ids), sampled_rows(config))))
    if len(logits):
        sample_largest(logits)


def step_of_prompts(config: RuntimeConfig, num_tokens: int, max_model_len: int, num_groups: int = 1) -> StepInput:
    """Return a step of whole prompts, as few as `num_tokens` need. All their blocks are block 0 of the pool."""
    lengths = [max_model_len] * (num_tokens // max_model_len) + [num_tokens % max_model_len] * (
        num_tokens % max_model_len > 0
    )
    chunks = [_scattered_chunk(length, length, config.block_size_tokens, num_groups) for length in lengths]
    return StepInput([0] * num_tokens, chunks, [])


def sampled_rows(config: RuntimeConfig) -> int:
    """Return how many rows of logits a step has at most: one per request, and one per draft."""
    return config.max_num_seqs + min(MOST_STEP_DRAFTS, config.draft_tokens * config.max_num_seqs)


def _scattered_chunk(num_tokens: int, context_len: int, block_size_tokens: int, num_groups: int) -> ChunkInput:
    num_blocks = -(-context_len // block_size_tokens)
    other_tables = [BlockRun(0, num_blocks, [0] * num_blocks)] * (num_groups - 1)
    return ChunkInput(num_tokens, context_len, 0, 0, num_blocks, [0] * num_blocks, other_tables)


def _graphs_estimate_bytes(
    config: RuntimeConfig, shard_config: ShardConfig, ranks: RankInfo, limit_bytes: int, backend: Backend
) -> int:
    """What graphs and their padding blocks will take: on the full side, since nothing is recorded yet."""
    shape = rank_config(shard_config.model_config, ranks)
    block_bytes = shape.kv_bytes_per_token(shard_config.dtype.itemsize) * config.block_size_tokens
    stored_as = (config.kv_cache_dtype.method, *shape.kv_shape, shard_config.dtype.itemsize)
    more_bytes = dequantizing_bytes(*stored_as) * shape.num_layers * config.block_size_tokens
    taken_bytes = _padded_step_bytes(config, shape, block_bytes + more_bytes, backend)
    buckets = _buckets(config, shape, taken_bytes, shape.max_model_len, limit_bytes)
    graphs_bytes = estimate_bytes(buckets, block_bytes=taken_bytes, num_layers=shape.num_layers)
    return graphs_bytes + KVCache.PADDING_BLOCKS * block_bytes


def _padded_step_bytes(config: RuntimeConfig, shape: ModelConfig, block_bytes: int, backend: Backend) -> int:
    """What a padded step of decodes takes for each KV block that it names, in all layers.

    Torch copies the block (`block_bytes`, with what dequantizing it takes). The kernels read it where it is, and keep a
    partial sum of each head for every SPLIT_TOKENS of a row.
    """
    if backend is Backend.TORCH:
        return block_bytes
    from millstream_kernels.attention.decode import SPLIT_TOKENS

    pool_heads, size = shape.kv_shape
    value_size = size - shape.head_dim if pool_heads == 1 else size  # of a latent without the rotated part
    partial_bytes = shape.num_heads * (value_size + 2) * torch.float32.itemsize  # values, their weight, a maximum
    return shape.num_layers * -(-partial_bytes * config.block_size_tokens // SPLIT_TOKENS)


def _buckets(
    config: RuntimeConfig,
    model_config: ModelConfig,
    block_bytes: int,
    max_model_len: int,
    limit_bytes: int,
    *,
    in_place: bool = False,
) -> Buckets:
    return buckets_within(
        limit_bytes,
        block_bytes=block_bytes,
        num_layers=model_config.num_layers,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        block_size_tokens=config.block_size_tokens,
        in_place=in_place,
    )
