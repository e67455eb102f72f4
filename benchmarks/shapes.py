"""Shapes of the Llamas that benchmarks make up, as config.json has them. Imports no torch: any process may read it."""

from __future__ import annotations

from typing import Any

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
# Llama-3.2-1B: 2.5 GB of 16-bit weights, 262 million of them the embedding, which is the output head as well.
ONE_BILLION: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
