"""Rotary embedding: one table of angles for all positions, and the rotation by it in place."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from millstream_runtime.models.config.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, *, long: bool = False) -> Tensor:
    """Radians per position of each pair: `[rotary_dim / 2]`, float32.

    `linear`, `llama3` and `yarn` stretch wavelengths for good. `longrope` has one set for sequences within the
    original context and, with `long`, another for longer ones.
    """
    dim = rope.rotary_dim(head_dim)
    power = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.type == "longrope":
        return 1.0 / (torch.tensor(rope.long_factor if long else rope.short_factor) * power)
    frequency = 1.0 / power
    if rope.type == "linear":
        return frequency / rope.factor
    if rope.type == "llama3":
        keep = _llama3_keep(rope, frequency)
    elif rope.type == "yarn":
        keep = _yarn_keep(rope, dim)
    else:
        return frequency
    return (1 - keep) * frequency / rope.factor + keep * frequency


def rotary_table(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for `rotate_`, each `[max_positions, rotary_dim]`.

    For `longrope` beyond its original context they are `[2 * max_positions, rotary_dim]`: the angles of short
    sequences, then those of long ones (see `ModelConfig.rotary_offset`).

    Computed in float32 whatever the model's type: the angle of a late position loses its meaning in 16 bits.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    sets = [inverse_frequencies(rope, head_dim)]
    if rope.type == "longrope" and max_positions > rope.original_max_position_embeddings:
        sets.append(inverse_frequencies(rope, head_dim, long=True))
    angles = torch.cat([torch.outer(positions, frequencies) for frequencies in sets])
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return torch.cat((cos, cos), dim=-1).to(device), torch.cat((-sin, sin), dim=-1).to(device)


def rotate_(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
    """`millstream_kernels.reference.rotary_embedding` in place, in three operations instead of nine.

    `heads`: `[T, heads, D]`; `cos`, `signed_sin`: `[T, 1, rotary_dim]` of `rotary_table`. The first `rotary_dim`
    elements turn. Rolling by half of them puts each element's partner in its place, and the minus of the first half
    is already in the sines.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < heads.shape[-1]:
        heads = heads[..., :rotary_dim]
    partners = heads.roll(rotary_dim // 2, dims=-1)
    heads.mul_(cos).addcmul_(partners, signed_sin)


def _llama3_keep(rope: RopeConfig, frequency: Tensor) -> Tensor:
    """Llama 3.1 (Meta 2024): wavelengths beyond the original context are stretched, short ones kept, others blended."""
    wavelength = 2 * math.pi / frequency
    turns = rope.original_max_position_embeddings / wavelength  # full turns within the original context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return keep.clamp(0.0, 1.0)  # 0: stretch fully, 1: keep


def _yarn_keep(rope: RopeConfig, dim: int) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): a ramp over the pairs between two numbers of full turns."""

    def pair_with(turns: float) -> float:
        """The pair, a real number, that makes `turns` full turns within the original context."""
        context = rope.original_max_position_embeddings
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    return 1 - ramp.clamp(0.0, 1.0)
