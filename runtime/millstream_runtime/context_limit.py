"""How many tokens a request may have by config.json, beyond what the model was trained with.

    max_position_embeddings    what a request may have if nobody asks for more
    with `yarn`                factor x original_max_position_embeddings
    with `linear`              factor x max_position_embeddings

The rule is vLLM's (`_get_and_verify_max_len`), with one exception: `dynamic` extends nothing here. The angles of
earlier tokens would change with every token, and cached keys with them. `llama3`, `longrope` and all of Gemma 3 extend
nothing either: their `max_position_embeddings` is the extended length already.

Planner and runtime both read it, so it imports nothing but the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

EXTENDED_ALREADY = ("gemma3", "gemma3_text", "phi3")  # by model_type
LIMIT_TOKENS = 1 << 28
UNSCALED_FIELDS = ("rope_theta", "partial_rotary_factor")

# What any family can have. LongRoPE needs a model that computes its keys again as it crosses: Phi names it for itself.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
PHI3_ROPE_TYPES = ("default", "longrope")
OLD_PHI3_ROPE_TYPES = {"su": "longrope", "yarn": "longrope"}  # the first Phi-3 folders called LongRoPE by these names
MROPE = "mrope"  # Qwen's with a vision tower: for text it is `default`, see `models/config/text_config.py`


def extended_context_tokens(config: Mapping[str, object], max_position_embeddings: int) -> int | None:
    """Return the longest context that rope scaling allows; None where that is `max_position_embeddings`.

    `config`: the language model's fields, of which none was checked.
    """
    if config.get("model_type") in EXTENDED_ALREADY:
        return None
    scaling = rope_fields(config.get("rope_parameters"), config.get("rope_scaling"))
    kind = scaling.get("rope_type") or scaling.get("type")
    factor = _number(scaling.get("factor"))
    if kind == "linear":
        original = _number(max_position_embeddings)
    elif kind == "yarn":
        # Where both say it, the outer field wins: see `models/config/rope_config.py`.
        outer = config.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
        original = _number(outer) or _number(max_position_embeddings)
    else:
        return None
    tokens = int(min(factor * original, LIMIT_TOKENS))
    return tokens if tokens > max_position_embeddings else None


def rope_fields(parameters: object, scaling: object) -> dict[str, object]:
    """Return what `rope_parameters` and `rope_scaling` say together; what is no object says nothing.

    Where a folder has both, the older `rope_scaling` says how the angles are scaled, as in transformers: the README of
    many a model tells its users to add it for long contexts, and newer folders have `rope_parameters` already. What
    has to do with no scaling, the base and the share of a head that turns, stays.
    """
    newer = dict(parameters) if isinstance(parameters, Mapping) else {}
    if not isinstance(scaling, Mapping) or not scaling:
        return newer
    return {name: newer[name] for name in UNSCALED_FIELDS if name in newer} | dict(scaling)


def rope_type_of(scaling: Mapping[str, object], aliases: Mapping[str, str] | None = None) -> str:
    """Return how one object of rope parameters says that angles are scaled, by its newer name."""
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    return (aliases or {}).get(kind, kind)


def is_served_rope_type(
    kind: str, types: Sequence[str], scaling: Mapping[str, object], config: Mapping[str, object]
) -> bool:
    """Return whether the runtime computes these angles: a type of the family, or LongRoPE that never crosses.

    GGUF files of Llama 3 hold the latter: one set of angles at every length.
    """
    lengths = (scaling.get("original_max_position_embeddings"), config.get("max_position_embeddings"))
    return kind in types or (kind == "longrope" and lengths[0] == lengths[1])


def unserved_rope_type(config: Mapping[str, object], model_type: str, *, has_tower: bool) -> str | None:
    """Return the rope type of config.json that the runtime refuses for this family; None where it serves all of them.

    `config`: the language model's fields, of which none was checked. Layers of several kinds have an object each.
    `has_tower`: whether the folder holds a vision tower, too.
    """
    is_phi3 = model_type == "phi3"
    types, aliases = (PHI3_ROPE_TYPES, OLD_PHI3_ROPE_TYPES) if is_phi3 else (ROPE_TYPES, {})
    if has_tower:
        types = (*types, MROPE)
    scaling = rope_fields(config.get("rope_parameters"), config.get("rope_scaling"))
    for each in (scaling, *(inner for inner in scaling.values() if isinstance(inner, Mapping))):
        kind = rope_type_of(each, aliases)
        if not is_served_rope_type(kind, types, each, config):
            return kind
    return None


def _number(value: object) -> float:
    """A positive, finite number; 0 for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return (
        float(min(value, LIMIT_TOKENS)) if value > 0 and not (isinstance(value, float) and math.isnan(value)) else 0.0
    )
