"""Mistral (Jiang et al. 2023, arXiv 2310.06825): Llama's layers, of which each sees only a window of tokens."""

from __future__ import annotations

from dataclasses import replace

from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig, common_fields
from millstream_runtime.models.families import llama

# What `transformers` takes where config.json does not say: version 0.1 had no field for it. Later versions say null.
DEFAULT_WINDOW = 4096


def read_config(fields: Fields) -> ModelConfig:
    config = ModelConfig(**common_fields(fields) | {"attention_bias": False, "mlp_bias": False})
    window = fields.optional_integer("sliding_window", DEFAULT_WINDOW)
    return replace(config, windows=(window,) * config.num_layers if window else ())


build = llama.build
