"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671): Llama's layers with a bias on queries, keys and values."""

from __future__ import annotations

from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig, common_fields
from millstream_runtime.models.layers.attention import grouped_query_attention
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.layers.pre_norm_decoder import dense_decoder
from millstream_runtime.models.loading.weights import Weights


def read_config(fields: Fields) -> ModelConfig:
    return ModelConfig(**common_fields(fields) | {"attention_bias": True, "mlp_bias": False})


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return dense_decoder(config, weights, lambda layer: grouped_query_attention(config, weights, layer))
