"""Folders with small Medusa heads."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.eagle_heads import save_head

HEADS = 3


def write_medusa_heads(
    folder: Path, hidden: int = 48, vocabulary: int = 199, layers: int = 1, prefix: str = ""
) -> Path:
    """Seeded random heads in the published layout."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for head in range(HEADS):
        for block in range(layers):
            tensors[f"{head}.{block}.linear.weight"] = 0.3 * torch.randn(hidden, hidden, generator=generator)
            tensors[f"{head}.{block}.linear.bias"] = 0.3 * torch.randn(hidden, generator=generator)
        tensors[f"{head}.{layers}.weight"] = 0.3 * torch.randn(vocabulary, hidden, generator=generator)
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": layers, "base_model_name_or_path": "org/target"}
    save_head(folder, config, {prefix + name: tensor for name, tensor in tensors.items()})
    return folder
