"""A Hugging Face folder of the Llama family to a float32 GGUF file, for llama.cpp: `gguf_llama.py FOLDER FILE`.

A script of its own, because it runs in the peers' environment (requirements/peers.txt) and not in ours. There is no
vocabulary in the file: the benchmark speaks in token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
LAYER_TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleave_rotary_halves(weight: Array, num_heads: int) -> Array:
    """Rows of a query or key projection from Hugging Face's order to llama.cpp's.

    Hugging Face rotates dimension i of a head with i + head_dim/2 (two halves); llama.cpp's `llama` architecture
    rotates 2i with 2i + 1 (pairs, as in the RoFormer paper). The same rotation acts on the same numbers when the rows
    are dealt like cards from the two halves.

    Args:
        weight: [num_heads * head_dim, hidden_size]
    """
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def gguf_name(name: str) -> str | None:
    """The name of a Hugging Face tensor in GGUF; None for one that llama.cpp does not want.

    Raises:
        ValueError: a tensor outside the Llama family.
    """
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    if name.endswith("rotary_emb.inv_freq"):
        return None
    parts = name.split(".", 3)
    if parts[:2] == ["model", "layers"] and len(parts) == 4:
        kind, _, suffix = parts[3].rpartition(".")
        if kind in LAYER_TENSORS and suffix == "weight":
            return f"blk.{parts[2]}.{LAYER_TENSORS[kind]}.{suffix}"
    raise ValueError(f"{name} is not a tensor of the Llama family")


def convert(folder: Path, file: Path) -> None:
    """Write `file`. Needs the packages gguf and safetensors.

    Raises:
        ValueError: the model is not a plain Llama.
    """
    import gguf
    from safetensors import safe_open

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if config["model_type"] != "llama" or kind != "default":
        raise ValueError(f"only a plain Llama can be converted, not {config['model_type']} with {kind} rotary scaling")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                target = gguf_name(name)
                if target is None:
                    continue
                weight = tensors.get_tensor(name).astype(np.float32)
                if name.endswith("q_proj.weight"):
                    weight = interleave_rotary_halves(weight, heads)
                elif name.endswith("k_proj.weight"):
                    weight = interleave_rotary_halves(weight, kv_heads)
                writer.add_tensor(target, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
