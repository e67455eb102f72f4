"""Dense decoders with gated MLPs: Llama and what descends from it.

layer = attention + 3 × hidden × intermediate + norms          gate, up, down
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream_operator.catalog.config_fields import ConfigFields
from millstream_operator.catalog.families.attention import read_attention
from millstream_operator.catalog.model_shape import ModelShape, Parameters


@dataclass(frozen=True, slots=True)
class DenseTraits:
    """What a family does differently from Llama, as its `transformers` config has it by default."""

    architecture: str
    qkv_bias: bool = False
    norms_per_layer: int = 2
    query_key_norms: bool = False
    tied: bool = False
    heads: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int = 4096


FAMILIES: dict[str, DenseTraits] = {
    "llama": DenseTraits("LlamaForCausalLM", max_position_embeddings=2048),
    "mistral": DenseTraits("MistralForCausalLM", max_position_embeddings=131072),
    "qwen2": DenseTraits("Qwen2ForCausalLM", qkv_bias=True, max_position_embeddings=32768),
    "qwen3": DenseTraits("Qwen3ForCausalLM", query_key_norms=True, head_size=128, max_position_embeddings=32768),
    "gemma": DenseTraits("GemmaForCausalLM", tied=True, head_size=256, max_position_embeddings=8192),
    "gemma2": DenseTraits(
        "Gemma2ForCausalLM", norms_per_layer=4, tied=True, head_size=256, max_position_embeddings=8192
    ),
    "gemma3": DenseTraits(
        "Gemma3ForCausalLM",
        norms_per_layer=4,
        query_key_norms=True,
        tied=True,
        heads=8,
        kv_heads=4,
        head_size=256,
        vocab_size=262208,
        max_position_embeddings=131072,
    ),
    "phi3": DenseTraits("Phi3ForCausalLM", max_position_embeddings=4096),
}


def read(fields: ConfigFields, kind: str) -> ModelShape:
    """A dense model; biases as the config says them."""
    traits = FAMILIES[kind]
    bias = fields.flag("attention_bias")
    attention = read_attention(
        fields,
        qkv_bias=traits.qkv_bias or bias,
        output_bias=bias,
        default_heads=traits.heads,
        default_kv_heads=traits.kv_heads,
        default_head_size=traits.head_size,
    )
    hidden, layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    intermediate = fields.integer("intermediate_size")
    vocabulary = fields.integer("vocab_size", traits.vocab_size)
    mlp_bias = (2 * intermediate + hidden) if fields.flag("mlp_bias") else 0
    norms = traits.norms_per_layer * hidden + (2 * attention.head_size if traits.query_key_norms else 0)
    return ModelShape(
        family=kind,
        architecture=traits.architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
        intermediate_sizes=(intermediate,),
        vocab_size=vocabulary,
        max_position_embeddings=fields.integer("max_position_embeddings", traits.max_position_embeddings),
        parameters=Parameters(
            embedding=vocabulary * hidden,
            attention=layers * attention.parameters,
            mlp=layers * (3 * hidden * intermediate + mlp_bias),
            experts=0,
            routers=0,
            norms=layers * norms + hidden,
            head=0 if fields.flag("tie_word_embeddings", traits.tied) else vocabulary * hidden,
        ),
        kv_projection_parameters=layers * attention.kv_parameters,
    )
