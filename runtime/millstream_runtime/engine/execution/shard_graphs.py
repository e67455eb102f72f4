"""The graphs of one rank: which buckets they may have, what they will take of its memory, and what replays them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.attention import varlen_attention
from millstream_runtime.engine.execution.buckets import Bucket, Buckets
from millstream_runtime.engine.execution.graph_budget import buckets_within, estimate_bytes
from millstream_runtime.engine.execution.graph_plan import GraphPlan
from millstream_runtime.engine.execution.graphs import GraphedDecodes
from millstream_runtime.engine.execution.recorders import Recorder
from millstream_runtime.engine.execution.static_decode import StaticDecode
from millstream_runtime.engine.host_limits import memory_limit_bytes
from millstream_runtime.engine.kernel_backends import Backend
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.linear.shares import RankInfo
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS


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
    block_bytes = cache.token_bytes * config.block_size_tokens * model.config.num_layers  # as graphs copy them
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
) -> GraphedDecodes:
    """Return what replays steps on this rank, with nothing recorded. `buckets`: all that may be recorded."""
    decode = StaticDecode(model, cache, buckets, backend)
    return GraphedDecodes(decode, recorder, is_only_rank=ranks.size == 1)


def estimated_bytes(config: RuntimeConfig, shape: ModelConfig, dtype_bytes: int, limit_bytes: int) -> int:
    """What graphs and their padding blocks will take: on the full side, since nothing is recorded yet.

    `shape`: of one rank. `limit_bytes`: what the engine may use of the device.
    """
    block_bytes = shape.kv_bytes_per_token(dtype_bytes) * config.block_size_tokens
    buckets = _buckets(config, shape, block_bytes, shape.max_model_len, limit_bytes)
    graphs_bytes = estimate_bytes(buckets, block_bytes=block_bytes, num_layers=shape.num_layers)
    return graphs_bytes + KVCache.PADDING_BLOCKS * block_bytes


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
