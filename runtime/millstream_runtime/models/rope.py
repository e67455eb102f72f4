"""Rotary embedding: one table of angles for all positions, and the rotation by it in place."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from millstream_runtime.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair: `[head_dim / 2]`, float32.

    `llama3` (Llama 3.1, Meta 2024): wavelengths beyond the original context are stretched by `factor`, short ones
    are kept, and those between are blended.
    """
    frequency = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.type == "default":
        return frequency
    wavelength = 2 * math.pi / frequency
    turns = rope.original_max_position_embeddings / wavelength  # full turns within the original context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)  # 0: stretch fully, 1: keep
    return (1 - keep) * frequency / rope.factor + keep * frequency


def rotary_table(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for `rotate_`, each `[max_positions, head_dim]`.

    Computed in float32 whatever the model's type: the angle of a late position loses its meaning in 16 bits.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(device), torch.cat((-sin, sin), dim=-1).to(device)


def rotate_(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
    """`millstream_kernels.reference.rotary_embedding` in place, in three operations instead of nine.

    `heads`: `[T, heads, D]`; `cos`, `signed_sin`: `[T, 1, D]` of `rotary_table`. Rolling by half a head puts each
    element's partner in its place, and the minus of the first half is already in the sines.
    """
    partners = heads.roll(heads.shape[-1] // 2, dims=-1)
    heads.mul_(cos).addcmul_(partners, signed_sin)
