"""Grouped-query attention, counted: the part that nearly all families share."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_operator.catalog.config_fields import ConfigFields


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention. Counts include biases."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    parameters: int
    kv_parameters: int


def read_attention(
    fields: ConfigFields,
    *,
    qkv_bias: bool,
    output_bias: bool,
) -> Attention:
    """Heads and sizes by the names of Llama's config, which most families took over."""
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if fields.values.get("head_dim") is None and hidden % heads:
        raise fields.contradiction(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and head_dim is missing"
        )
    head = fields.integer("head_dim", hidden // heads)
    kv_width = 2 * kv_heads * head
    kv = hidden * kv_width + (kv_width if qkv_bias else 0)
    query = hidden * heads * head + (heads * head if qkv_bias else 0)
    output = heads * head * hidden + (hidden if output_bias else 0)
    return Attention(heads, kv_heads, head, query + kv + output, kv)
