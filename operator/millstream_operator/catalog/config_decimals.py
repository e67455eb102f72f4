"""Check the numbers of a config.json that the planner does not compute with, and the runtime does. Pure.

A negative frequency, factor or epsilon ends a boot after the weights were downloaded, or gives answers without meaning.
So it is refused where the sizes are read: before a pod exists.
"""

from __future__ import annotations

from collections.abc import Mapping

from millstream_operator.catalog.config_fields import ConfigFields

TOP_LEVEL = (
    "rope_theta",
    "rope_local_base_freq",
    "rotary_emb_base",
    "rotary_pct",
    "partial_rotary_factor",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "original_max_position_embeddings",
)
OF_ROPE = (
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "attention_factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "original_max_position_embeddings",
)


def check_decimals(fields: ConfigFields) -> None:
    """Raises ConfigError: a number that is not positive and finite, or rope parameters that are no object."""
    for name in TOP_LEVEL:
        fields.decimal(name)
    for name in ("rope_parameters", "rope_scaling"):
        _check_rope(ConfigFields(fields.mapping(name) or {}, fields.source, f"{name}."))


def _check_rope(rope: ConfigFields) -> None:
    """One object of rope parameters, or one for each kind of layer (`full_attention`, `sliding_attention`)."""
    by_layer = [
        ConfigFields(inner, rope.source, f"{rope.prefix}{name}.")
        for name, inner in rope.values.items()
        if isinstance(inner, Mapping)
    ]
    for one in (rope, *by_layer):
        for name in OF_ROPE:
            one.decimal(name)
