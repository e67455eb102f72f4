"""Llama 2 and 3, and every folder whose architecture is LlamaForCausalLM or another name of it (Touvron et al. 2023,
arXiv 2307.09288)."""

from __future__ import annotations

from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig, common_fields
from millstream_runtime.models.layers.attention import grouped_query_attention
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.layers.pre_norm_decoder import dense_decoder
from millstream_runtime.models.loading.weights import Weights

# Fields by which models of these types could differ from Llama. No published folder uses them.
UNUSED = {"internlm3": ("bias", "qkv_bias"), "iquestcoder": ("clip_qkv",)}


def read_config(fields: Fields) -> ModelConfig:
    # transformers reads no window of a Llama; the code of the other types, which it has not, could.
    is_llama = fields.get("model_type") in (None, "llama")
    if not is_llama and fields.get("sliding_window") is not None and fields.get("use_sliding_window", True):
        raise fields.unsupported("sliding_window", fields.get("sliding_window"), "full attention")
    for name in UNUSED.get(str(fields.get("model_type")), ()):
        if fields.get(name):
            raise fields.unsupported(name, fields.get(name), "false")
    return ModelConfig(**common_fields(fields))


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return dense_decoder(
        config,
        weights,
        lambda layer: grouped_query_attention(config, weights, layer, output_bias=config.attention_bias),
    )
