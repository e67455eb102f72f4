"""A small sharded model as bytes by file name, with the other files of typical repositories; no torch."""

from __future__ import annotations

import json
import struct

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
SHARD_ELEMENTS = 600_000


def safetensors(tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    """A file of the format; tensors: name -> (dtype, shape, bytes)."""
    header, offset = {}, 0
    for name, (dtype, shape, size_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size_bytes]}
        offset += size_bytes
    text = json.dumps(header).encode()
    content = bytes(range(251)) * (offset // 251 + 1)
    return struct.pack("<Q", len(text)) + text + content[:offset]


def model_files() -> dict[str, bytes]:
    """A sharded model and files next to it that a server does not need; each shard is about 1.2 MB."""
    shape = {"model.a.weight": ("BF16", [SHARD_ELEMENTS], 2 * SHARD_ELEMENTS)}
    other = {"lm_head.weight": ("BF16", [SHARD_ELEMENTS - 4], 2 * SHARD_ELEMENTS - 8), "q": ("I32", [2], 8)}
    index = {"weight_map": {"model.a.weight": SHARDS[0], "lm_head.weight": SHARDS[1], "q": SHARDS[1]}}
    return {
        "config.json": json.dumps(LLAMA).encode(),
        "generation_config.json": b'{"eos_token_id": [2, 3]}',
        "tokenizer.json": b'{"model": {}}',
        "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{x}}"}',
        "model.safetensors.index.json": json.dumps(index).encode(),
        SHARDS[0]: safetensors(shape),
        SHARDS[1]: safetensors(other),
        "consolidated.safetensors": safetensors(shape),
        "pytorch_model.bin": b"a pickle",
        "modeling_evil.py": b"import os",
        "README.md": b"# hello",
        "original/consolidated.safetensors": safetensors(shape),
    }


WANTED = frozenset(
    ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json")
) | frozenset(SHARDS)


class Naps:
    """Instead of sleeping: remembers how long each wait would have been."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
