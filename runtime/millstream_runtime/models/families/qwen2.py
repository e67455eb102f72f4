"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671): Llama's layers with a bias on queries, keys and values."""

from __future__ import annotations

from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig, common_fields
from millstream_runtime.models.layers.attention import grouped_query_attention
from millstream_runtime.models.layers.decoder import Decoder, pre_norm_layer
from millstream_runtime.models.layers.mlp import gated_mlp
from millstream_runtime.models.loading.weights import Weights


def read_config(fields: Fields) -> ModelConfig:
    return ModelConfig(**common_fields(fields) | {"attention_bias": True, "mlp_bias": False})


def build(config: ModelConfig, weights: Weights) -> Decoder:
    layers = [
        pre_norm_layer(
            config,
            weights,
            layer,
            grouped_query_attention(config, weights, layer),
            gated_mlp(config, weights, f"model.layers.{layer}.mlp", config.intermediate_size),
        )
        for layer in range(config.num_layers)
    ]
    return Decoder(config, weights, layers)
