"""Published shapes with random weights. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as config.json has it."""

    config: dict[str, Any]


QWEN3_COMMON = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960}
SHAPES = {
    "Qwen3-0.6B": Shape(
        QWEN3_COMMON
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-8B": Shape(
        QWEN3_COMMON
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
    ),
    "Llama-3.1-8B": Shape(
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
}
TINY = Shape(
    {
        "model_type": "qwen3",
        "vocab_size": 211,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
)
