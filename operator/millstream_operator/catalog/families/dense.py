"""Dense decoders with gated MLPs: Llama and what descends from it.

layer = attention + 3 × hidden × intermediate + norms          gate, up, down
"""

from __future__ import annotations

from millstream_operator.catalog.config_fields import ConfigFields
from millstream_operator.catalog.families.attention import read_attention
from millstream_operator.catalog.model_shape import ModelShape, Parameters
from millstream_runtime.model_families import DenseTraits, ModelFamily


def read(fields: ConfigFields, family: ModelFamily, traits: DenseTraits) -> ModelShape:
    """A dense model; biases as the config says them."""
    bias = fields.flag("attention_bias")
    attention = read_attention(
        fields,
        qkv_bias=traits.qkv_bias or bias,
        output_bias=bias,
    )
    hidden, layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    intermediate = fields.integer("intermediate_size")
    vocabulary = fields.integer("vocab_size")
    mlp_bias = (2 * intermediate + hidden) if fields.flag("mlp_bias") else 0
    norms = traits.norms_per_layer * hidden + (2 * attention.head_size if traits.query_key_norms else 0)
    return ModelShape(
        family=family.model_type,
        architecture=family.architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
        intermediate_sizes=(intermediate,),
        vocab_size=vocabulary,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        parameters=Parameters(
            embedding=vocabulary * hidden,
            attention=layers * attention.parameters,
            mlp=layers * (3 * hidden * intermediate + mlp_bias),
            experts=0,
            routers=0,
            norms=layers * norms + hidden,
            head=0 if fields.flag("tie_word_embeddings") else vocabulary * hidden,
        ),
        kv_projection_parameters=layers * attention.kv_parameters,
    )
