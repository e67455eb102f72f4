"""Tiny models as GGUF files, written by llama.cpp's own Python package, and the same weights as a Hugging Face folder.

Blocks are random bytes with scales that keep weights small: every code and every scale occurs. What they mean is what
the package says (`gguf.quants.dequantize`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from benchmarks.gguf_llama import interleave_rotary_halves

LARGEST_WEIGHT = 0.3
# Of each type where its float16 are in a block, and by how much the first is multiplied at most.
HALVES: dict[str, tuple[tuple[int, ...], float]] = {
    "Q4_0": ((0,), 8),
    "Q4_1": ((0, 2), 15),
    "Q5_0": ((0,), 16),
    "Q5_1": ((0, 2), 31),
    "Q8_0": ((0,), 128),
    "Q2_K": ((80, 82), 45),
    "Q3_K": ((108,), 128),
    "Q4_K": ((0, 2), 63 * 15),
    "Q5_K": ((0, 2), 63 * 31),
    "Q6_K": ((208,), 128 * 32),
    "IQ4_NL": ((0,), 127),
}
PLAIN_TYPES = ("F32", "F16", "BF16")
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TypeOf = Callable[[str], str]  # of a module's weight, by its name of Hugging Face


def random_rows(kind: str, rows: int, columns: int, seed: int) -> np.ndarray[Any, Any]:
    """Blocks, uint8 `[rows, bytes of a row]`."""
    rng = np.random.default_rng(seed)
    elements, block_bytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    blocks = rng.integers(0, 256, (rows * columns // elements, block_bytes), dtype=np.uint8)
    places, span = HALVES[kind]
    for place in places:
        scales = (rng.random(len(blocks)) + 0.1) * LARGEST_WEIGHT / span
        blocks[:, place : place + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def q4_k_m(module: str) -> str:
    """As llama.cpp mixes them: Q6_K for the head and for some of the values and down projections."""
    is_more = module.endswith(("v_proj", "down_proj")) and ".layers.0." in module
    return "Q6_K" if is_more or module == "lm_head" else "Q4_K"


def write_gguf(
    folder: Path, file: Path, type_of: TypeOf, *, tensors: dict[str, Any] | None = None, **metadata: Any
) -> Path:
    """Write `file` with weights of these types in the shapes of a Hugging Face folder, and a folder of those weights.

    `metadata`: fields that replace others; None leaves one out. `tensors`: more of them. Returns the folder.
    """
    dense = file.parent.with_name(file.parent.name + "-dense")
    dense.mkdir(parents=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    arch = {"gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(file, arch)
    for name, value in {**fields_of(config, arch), **metadata}.items():
        if value is not None:
            add_field(writer, name, value)
    stored = {name: one for path in sorted(folder.glob("*.safetensors")) for name, one in load_file(path).items()}
    for number, (name, tensor) in enumerate(stored.items()):
        module, _, suffix = name.rpartition(".")
        target = f"{gguf_module(module, arch)}.{suffix}"
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        turned = heads.get(module.rpartition(".")[2]) if arch == "llama" else None
        kind = type_of(module) if tensor.dim() == 2 else "F32"
        if kind in PLAIN_TYPES:
            rounded = tensor.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind])
            stored[name] = rounded.float()
            values = rounded.float().numpy() + (1.0 if arch.startswith("gemma") and name.endswith("norm.weight") else 0)
            rows = gguf.quants.quantize(np.ascontiguousarray(values, dtype=np.float32), Type[kind])
        else:
            rows = random_rows(kind, tensor.shape[0], tensor.shape[1], seed=number)
            stored[name] = torch.from_numpy(gguf.quants.dequantize(rows, Type[kind]).astype(np.float32))
        if turned is not None:
            flat = rows.reshape(len(rows), -1)
            rows = interleave_rotary_halves(flat, turned).reshape(rows.shape)
        writer.add_tensor(target, rows, raw_dtype=Type[kind])
    for target, values in (tensors or {}).items():
        writer.add_tensor(target, values)
    save_file({name: one.contiguous() for name, one in stored.items()}, dense / "model.safetensors")
    (dense / "config.json").write_text(json.dumps(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dense


def gguf_module(module: str, arch: str) -> str:
    names = GEMMA_NAMES if arch.startswith("gemma") else NAMES
    if module in names:
        return names[module]
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{names[part]}"


def fields_of(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """What llama.cpp's converter writes of a config.json."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    found = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
    }
    if arch == "llama":
        found["rope.dimension_count"] = config["head_dim"]
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(field):
            found[field] = float(config[field])
    if arch.startswith("gemma"):
        found["attention.sliding_window"] = config["sliding_window"]
    ends = config.get("eos_token_id")
    fields = {f"{arch}.{name}": value for name, value in found.items()}
    return fields | {"tokenizer.ggml.eos_token_id": ends[0] if isinstance(ends, list) else ends}


def add_field(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)
