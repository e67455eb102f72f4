"""Decoders from before the gated MLP: Falcon and GPT-NeoX. LayerNorms have weight and bias."""

from __future__ import annotations

from millstream_operator.catalog.config_fields import ConfigFields
from millstream_operator.catalog.model_shape import ModelShape, Parameters
from millstream_runtime.model_families import ModelFamily


def read_falcon(fields: ConfigFields, family: ModelFamily) -> ModelShape:
    """Falcon 7B (one KV head), 40B and 180B (grouped heads, "new decoder architecture"), Falcon2 11B."""
    hidden, layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers", 32)
    heads, vocabulary = fields.integer("num_attention_heads", 71), fields.integer("vocab_size")
    grouped = fields.flag("new_decoder_architecture")
    shared = 1 if fields.flag("multi_query", True) else heads
    kv_heads = fields.integer("num_kv_heads", heads) if grouped else shared
    head = _head_size(fields, hidden, heads)
    intermediate = fields.integer("ffn_hidden_size", 4 * hidden)
    bias = fields.flag("bias")
    kv = hidden * 2 * kv_heads * head + (2 * kv_heads * head if bias else 0)
    attention = kv + 2 * hidden * hidden + (2 * hidden if bias else 0)
    mlp = 2 * hidden * intermediate + (intermediate + hidden if bias else 0)
    layer_norms = fields.integer("num_ln_in_parallel_attn", 2) if grouped else 1
    if not fields.flag("parallel_attn", True):
        layer_norms = 2
    return ModelShape(
        family=family.model_type,
        architecture=family.architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head,
        intermediate_sizes=(intermediate,),
        vocab_size=vocabulary,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        parameters=Parameters(
            embedding=vocabulary * hidden,
            attention=layers * attention,
            mlp=layers * mlp,
            experts=0,
            routers=0,
            norms=layers * layer_norms * 2 * hidden + 2 * hidden,
            head=0 if fields.flag("tie_word_embeddings") else vocabulary * hidden,
        ),
        kv_projection_parameters=layers * kv,
    )


def read_gpt_neox(fields: ConfigFields, family: ModelFamily) -> ModelShape:
    """GPT-NeoX and Pythia: full attention, biases everywhere."""
    hidden, layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    heads, vocabulary = fields.integer("num_attention_heads"), fields.integer("vocab_size")
    intermediate = fields.integer("intermediate_size")
    biased = fields.flag("attention_bias", True)
    kv = 2 * hidden * hidden + (2 * hidden if biased else 0)
    attention = kv + 2 * hidden * hidden + (2 * hidden if biased else 0)
    return ModelShape(
        family=family.model_type,
        architecture=family.architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=_head_size(fields, hidden, heads),
        intermediate_sizes=(intermediate,),
        vocab_size=vocabulary,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        parameters=Parameters(
            embedding=vocabulary * hidden,
            attention=layers * attention,
            mlp=layers * (2 * hidden * intermediate + intermediate + hidden),
            experts=0,
            routers=0,
            norms=layers * 4 * hidden + 2 * hidden,
            head=0 if fields.flag("tie_word_embeddings") else vocabulary * hidden,
        ),
        kv_projection_parameters=layers * kv,
    )


def _head_size(fields: ConfigFields, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise fields.contradiction(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    return hidden // heads
