"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024, arXiv 2404.14219): Llama's layers from fused checkpoint tensors.

Phi-4-mini turns only part of each head. The long-context ones use LongRoPE: a sequence that grows beyond the original
context turns by other angles from its first token on, so its keys are computed again once (`ModelConfig.rotary_offset`
and `must_recompute`), as `transformers` does.
"""

from __future__ import annotations

from millstream_runtime.context_limit import OLD_PHI3_ROPE_TYPES, PHI3_ROPE_TYPES
from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig, common_fields
from millstream_runtime.models.config.rope_config import read_rope
from millstream_runtime.models.layers.attention import grouped_query_attention
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.layers.pre_norm_decoder import dense_decoder
from millstream_runtime.models.loading.weights import Weights


def read_config(fields: Fields) -> ModelConfig:
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    rope = read_rope(fields, head_dim, allow_partial=True, types=PHI3_ROPE_TYPES, aliases=OLD_PHI3_ROPE_TYPES)
    common = common_fields(fields, rope=rope)
    return ModelConfig(**common | {"attention_bias": False, "mlp_bias": False})


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return dense_decoder(
        config, weights, lambda layer: grouped_query_attention(config, weights, layer, fused=True), fused_mlp=True
    )
