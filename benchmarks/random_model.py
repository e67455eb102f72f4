"""A Llama of the demo model's shape with seeded random weights, for when no trained folder is at hand."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def write_random_model(folder: Path) -> Path:
    """Write config.json and model.safetensors (35 MB, float32) into `folder`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        initializer_range=0.08,  # wide enough that logits differ: greedy decoding does not fall into one token
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
