"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671): Llama's layers with a bias on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import FULL, SLIDING, ModelConfig, common_fields, windows_of
from millstream_runtime.models.layers.attention import grouped_query_attention
from millstream_runtime.models.layers.decoder import Decoder, pre_norm_layer
from millstream_runtime.models.layers.mlp import gated_mlp
from millstream_runtime.models.loading.weights import Weights

DEFAULT_WINDOW, DEFAULT_FULL_LAYERS = 4096, 28  # what `transformers` takes where config.json does not say


def read_config(fields: Fields) -> ModelConfig:
    return with_windows(fields, ModelConfig(**common_fields(fields) | {"attention_bias": True, "mlp_bias": False}))


def with_windows(fields: Fields, config: ModelConfig) -> ModelConfig:
    """The layers from `max_window_layers` on see a window, if `use_sliding_window` asks for it at all."""
    window = fields.optional_integer("sliding_window", DEFAULT_WINDOW) if fields.flag("use_sliding_window") else None
    if window is None:
        return config
    full_layers = fields.get("max_window_layers", DEFAULT_FULL_LAYERS)
    if not isinstance(full_layers, int) or full_layers < 0:
        raise fields.invalid("max_window_layers", f"{full_layers!r}; it must be an integer of at least 0")
    types = [FULL if layer < full_layers else SLIDING for layer in range(config.num_layers)]
    return replace(config, windows=windows_of(fields, window, types))


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
