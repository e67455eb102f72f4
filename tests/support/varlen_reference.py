"""FlashAttention's place taken by plain operations, so that a CPU runs everything around `varlen_attention`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millstream_runtime.engine.attention import varlen_attention
from millstream_runtime.engine.attention.varlen_attention import PlacedSequences


def reference_attention(query: Tensor, keys: Tensor, values: Tensor, placed: PlacedSequences, scale: float) -> Tensor:
    """As `varlen_attention.flash_attention`; for decodes without a number that the host reads, as for a recording."""
    if placed.max_queries == 1:
        owners = torch.arange(len(query))
        last = placed.lengths - 1
    else:
        counts = placed.query_starts.diff()
        owners = torch.repeat_interleave(torch.arange(len(counts)), counts)
        last = placed.lengths[owners] - counts[owners] + torch.arange(len(query)) - placed.query_starts[owners]
    positions = torch.arange(placed.max_length)
    seen = positions <= last[:, None]
    slots = (placed.first_slots[owners][:, None] + positions).where(seen, 0)
    group = query.shape[1] // keys.shape[1]
    key, value = (part[slots].repeat_interleave(group, dim=2) for part in (keys, values))  # [T, max_length, H, D]
    scores = torch.einsum("thd,tshd->ths", query, key) * scale
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    return torch.einsum("ths,tshd->thd", weights, value.masked_fill(~seen[:, :, None, None], 0.0))


def use_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine on a CPU take the path of a GPU with 16-bit numbers."""
    monkeypatch.setattr(varlen_attention, "can_read", lambda pool: True)
    monkeypatch.setattr(varlen_attention, "flash_attention", reference_attention)
