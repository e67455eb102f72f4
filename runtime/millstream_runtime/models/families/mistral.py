"""Mistral (Jiang et al. 2023, arXiv 2310.06825): Llama's layers, of which each sees only a window of tokens."""

from __future__ import annotations

from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig, common_fields
from millstream_runtime.models.families import llama


def read_config(fields: Fields) -> ModelConfig:
    return ModelConfig(**common_fields(fields) | {"attention_bias": False, "mlp_bias": False})


build = llama.build
