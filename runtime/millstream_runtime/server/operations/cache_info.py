"""`vllm:cache_config_info`: how the KV pool is cut, in the labels of vLLM's own configuration of its cache."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import GaugeMetricFamily

from millstream_runtime.config import DEFAULT_BLOCK_SIZE_TOKENS, RuntimeConfig
from millstream_runtime.engine.kv.pool_size import MemoryUse
from millstream_runtime.engine.request import EngineStats


def cache_config_labels(config: RuntimeConfig) -> dict[str, str]:
    """Labels that are known before an engine is."""
    return {
        "cache_dtype": config.kv_cache_dtype.value,  # auto: the model's
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization_percent / 100),
        "is_attention_free": "False",
        "kv_cache_memory_bytes": str(config.kv_cache_memory_bytes),
        "kv_offloading_size": "None",
        "num_cpu_blocks": "0",
        "num_gpu_blocks_override": "None",
        "prefix_caching_hash_algo": "sha256",
        "swap_space": "0",  # of older versions of vLLM
        "user_specified_block_size": str(config.block_size_tokens != DEFAULT_BLOCK_SIZE_TOKENS),
    }


def cache_config_info(
    labels: Mapping[str, str], known: Mapping[str, str], stats: EngineStats, memory: MemoryUse | None
) -> GaugeMetricFamily:
    """Return the gauge, always 1. `known`: labels from `cache_config_labels`."""
    block_size = str(stats.block_size_tokens)
    sizes = {
        **known,
        "block_size": block_size,
        # One number here: blocks are hashed whole, and a hit ends with a block.
        "cache_hit_alignment_tokens": block_size,
        "effective_attention_block_size": block_size,
        "hash_block_size": block_size,
        "kv_cache_size_tokens": str(None if memory is None else memory.kv_cache_tokens),
        "num_gpu_blocks": str(stats.kv_blocks_total),
    }
    info = GaugeMetricFamily("vllm:cache_config_info", "How the KV pool is cut", labels=[*labels, *sizes])
    info.add_metric([*labels.values(), *sizes.values()], 1.0)
    return info
