"""Llamas with seeded random weights, for when no trained folder is at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

DEMO: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 16384,
}
# SmolLM2-135M: the weights (538 MB as float32) are far larger than any cache, so decoding is bound by memory.
LARGER: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}


def write_random_model(folder: Path, shape: dict[str, Any] = DEMO) -> Path:
    """Write config.json and model.safetensors (float32, tied embeddings) into `folder`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape,
        tie_word_embeddings=True,
        initializer_range=0.08,  # wide enough that logits differ: greedy decoding does not fall into one token
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
