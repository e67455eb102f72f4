"""How a model's rotary embedding is scaled, read from config.json in the spellings of old and new folders."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from millstream_runtime.context_limit import ROPE_TYPES, is_served_rope_type, rope_fields, rope_type_of
from millstream_runtime.models.config.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base frequency, how it is stretched, and how much of a head turns.

    `dynamic` (NTK by length) equals `default` up to max_position_embeddings, and the engine serves no longer requests.
    """

    theta: float
    type: str = "default"
    partial_rotary_factor: float = 1.0  # share of a head that turns; the rest passes unchanged
    attention_factor: float = 1.0  # on cosines and sines, so its square is on the scores (yarn, longrope)
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    mscale_all_dim: float = 0.0  # yarn in DeepSeek, which puts it on the scores as well
    short_factor: tuple[float, ...] = ()  # longrope, for sequences up to the original context, one a pair
    long_factor: tuple[float, ...] = ()  # longrope, for longer ones

    def rotary_dim(self, head_dim: int) -> int:
        """Elements of a head that turn."""
        return int(head_dim * self.partial_rotary_factor)


def read_rope(
    fields: Fields,
    head_dim: int,
    *,
    allow_partial: bool = False,
    types: tuple[str, ...] = ROPE_TYPES,
    aliases: dict[str, str] | None = None,
) -> RopeConfig:
    """From `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (before), or from all of them.

    Args:
        allow_partial: whether this family's model turns only a part of a head when asked to.
        types: what this family knows.
        aliases: older names of rope types in this family.

    Raises:
        RuntimeFailure: CheckpointInvalid or UnsupportedByRuntime, naming the field.
    """
    scaling = rope_section(fields, fields.section("rope_parameters"))
    theta = scaling.number("rope_theta", fields.optional_number("rope_theta"))
    partial = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rope = scaled_rope(fields, scaling, theta, head_dim, partial_rotary_factor=partial, types=types, aliases=aliases)
    if partial != 1.0 and not allow_partial:
        raise fields.unsupported("partial_rotary_factor", partial, "1.0")
    if partial > 1.0 or rope.rotary_dim(head_dim) % 2 or rope.rotary_dim(head_dim) < 2:
        raise fields.invalid("partial_rotary_factor", f"{partial}; it must leave an even part of head_dim {head_dim}")
    return rope


def rope_section(fields: Fields, parameters: Fields | None) -> Fields:
    """`parameters`, the newer object, and `rope_scaling` of `fields` in one: see `context_limit.rope_fields`."""
    scaling = fields.section("rope_scaling")
    if scaling is None or parameters is None:
        return scaling or parameters or Fields(fields.path, {})
    return Fields(fields.path, rope_fields(parameters.values, scaling.values), prefix="rope_scaling.")


def scaled_rope(
    fields: Fields,
    scaling: Fields,
    theta: float,
    head_dim: int,
    *,
    partial_rotary_factor: float = 1.0,
    types: tuple[str, ...] = ROPE_TYPES,
    aliases: dict[str, str] | None = None,
) -> RopeConfig:
    """One object of rope parameters, checked; `fields` is the whole config.json around it."""
    kind = rope_type_of(scaling.values, aliases)
    if not is_served_rope_type(kind, types, scaling.values, fields.values):
        raise fields.unsupported("rope_type", kind, ", ".join(types))
    common: dict[str, Any] = {"theta": theta, "type": kind, "partial_rotary_factor": partial_rotary_factor}
    if kind in ("default", "dynamic"):
        return RopeConfig(**common)
    if kind == "linear":
        return RopeConfig(**common, factor=scaling.number("factor"))
    max_positions = fields.integer("max_position_embeddings")
    # Where both say it, the outer field wins: Phi keeps the length it was trained with there.
    original = fields.integer(
        "original_max_position_embeddings", scaling.integer("original_max_position_embeddings", max_positions)
    )
    common["original_max_position_embeddings"] = original
    if kind == "llama3":
        return RopeConfig(
            **common,
            factor=scaling.number("factor"),
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
        )
    if kind == "yarn":
        return RopeConfig(**common, **_yarn(scaling))
    factor = scaling.number("factor", max_positions / original)
    pairs = int(head_dim * partial_rotary_factor) // 2
    return RopeConfig(
        **common,
        factor=factor,
        attention_factor=scaling.number("attention_factor", _longrope_attention_factor(factor, original)),
        short_factor=scaling.numbers("short_factor", pairs),
        long_factor=scaling.numbers("long_factor", pairs),
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature for a context stretched by `factor` (Peng et al. 2023, arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(scaling: Fields) -> dict[str, Any]:
    factor = scaling.number("factor")
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        mscale_all_dim = scaling.number("mscale_all_dim")
        temperature = yarn_mscale(factor, scaling.number("mscale")) / yarn_mscale(factor, mscale_all_dim)
    else:
        temperature = yarn_mscale(factor)
    return {
        "factor": factor,
        "attention_factor": scaling.number("attention_factor", temperature),
        "beta_fast": scaling.number("beta_fast", 32.0),
        "beta_slow": scaling.number("beta_slow", 1.0),
        "truncate": scaling.flag("truncate", True),
        "mscale_all_dim": scaling.number("mscale_all_dim") if mscale_all_dim else 0.0,
    }


def _longrope_attention_factor(factor: float, original: int) -> float:
    """LongRoPE's (Ding et al. 2024, arXiv 2402.13753)."""
    return 1.0 if factor <= 1 or original < 2 else math.sqrt(1 + math.log(factor) / math.log(original))
