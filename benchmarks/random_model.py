"""Llamas with seeded random weights, for when no trained folder is at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.shapes import DEMO


def write_random_model(folder: Path, shape: dict[str, Any] = DEMO, dtype: torch.dtype = torch.float32) -> Path:
    """Write config.json and model.safetensors (tied embeddings) into `folder`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape,
        tie_word_embeddings=True,
        initializer_range=0.08,  # wide enough that logits differ: greedy decoding does not fall into one token
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder
