"""Qwen3 (Yang et al. 2025, arXiv 2505.09388): Llama's layers with an RMS norm on every query and key head."""

from __future__ import annotations

from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig, common_fields
from millstream_runtime.models.layers.attention import GroupedQueryAttention, grouped_query_attention, qk_norm_of
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.layers.pre_norm_decoder import dense_decoder
from millstream_runtime.models.loading.weights import Weights


def read_config(fields: Fields) -> ModelConfig:
    return ModelConfig(**common_fields(fields) | {"mlp_bias": False})


def attention(config: ModelConfig, weights: Weights, layer: int) -> GroupedQueryAttention:
    prefix = f"model.layers.{layer}.self_attn"
    query, key = (weights.tensor(f"{prefix}.{name}_norm.weight", config.head_dim) for name in ("q", "k"))
    return grouped_query_attention(
        config, weights, layer, output_bias=config.attention_bias, qk_norm=qk_norm_of(config, weights, query, key)
    )


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return dense_decoder(config, weights, lambda layer: attention(config, weights, layer))
