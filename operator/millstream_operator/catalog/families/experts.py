"""Mixtures of experts with ordinary attention: Mixtral, Qwen2-MoE, Qwen3-MoE.

sparse layer = attention + router + experts × 3 × hidden × expert width [+ shared expert]
"""

from __future__ import annotations

from millstream_operator.catalog.config_fields import ConfigFields
from millstream_operator.catalog.families.attention import read_attention
from millstream_operator.catalog.model_shape import ModelShape, Parameters
from millstream_runtime.model_families import ExpertTraits, ModelFamily


def read(fields: ConfigFields, family: ModelFamily, traits: ExpertTraits) -> ModelShape:
    """A sparse model; layers that its config keeps dense are counted as dense."""
    bias = fields.flag("attention_bias")
    attention = read_attention(fields, qkv_bias=fields.flag("qkv_bias", traits.qkv_bias) or bias, output_bias=bias)
    hidden, layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    intermediate = fields.integer("intermediate_size")
    width = fields.integer(traits.width_field)
    num_experts = fields.integer(traits.experts_field)
    vocabulary = fields.integer("vocab_size")
    sparse = layers if traits.every_layer else _sparse_layers(fields, layers)
    shared = fields.integer("shared_expert_intermediate_size", 0) if traits.shared_expert else 0
    shared_gate = hidden if shared else 0
    norms = 2 * hidden + (2 * attention.head_size if traits.query_key_norms else 0)
    widths = {width} | ({shared} if shared else set()) | ({intermediate} if sparse < layers else set())
    return ModelShape(
        family=family.model_type,
        architecture=family.architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
        intermediate_sizes=tuple(sorted(widths)),
        named_intermediate_size=intermediate,
        vocab_size=vocabulary,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        parameters=Parameters(
            embedding=vocabulary * hidden,
            attention=layers * attention.parameters,
            mlp=3 * hidden * (sparse * shared + (layers - sparse) * intermediate),
            experts=sparse * num_experts * 3 * hidden * width,
            routers=sparse * (hidden * num_experts + shared_gate),
            norms=layers * norms + hidden,
            head=0 if fields.flag("tie_word_embeddings") else vocabulary * hidden,
        ),
        kv_projection_parameters=layers * attention.kv_parameters,
        num_experts=num_experts,
        num_experts_per_token=fields.integer("num_experts_per_tok"),
    )


def _sparse_layers(fields: ConfigFields, layers: int) -> int:
    step = fields.integer("decoder_sparse_step", 1)
    dense_by_name = sum(
        1 for layer in fields.integers("mlp_only_layers") if 0 <= layer < layers and not (layer + 1) % step
    )
    return layers // step - dense_by_name
