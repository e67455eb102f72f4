"""Angles of the rotary embedding, one table for all positions."""

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
    """Cosines and sines, each `[max_positions, head_dim / 2]`, float32: angles lose meaning in 16 bits."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return angles.cos().to(device), angles.sin().to(device)
