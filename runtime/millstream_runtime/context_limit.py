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
from collections.abc import Mapping

EXTENDED_ALREADY = ("gemma3", "gemma3_text", "phi3")  # by model_type
LIMIT_TOKENS = 1 << 28


def extended_context_tokens(config: Mapping[str, object], max_position_embeddings: int) -> int | None:
    """Return the longest context that rope scaling allows; None where that is `max_position_embeddings`.

    `config`: the language model's fields, of which none was checked.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, Mapping) or config.get("model_type") in EXTENDED_ALREADY:
        return None
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


def _number(value: object) -> float:
    """A positive, finite number; 0 for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return (
        float(min(value, LIMIT_TOKENS)) if value > 0 and not (isinstance(value, float) and math.isnan(value)) else 0.0
    )
