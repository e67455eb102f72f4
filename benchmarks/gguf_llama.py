"""A Hugging Face folder of the Llama family to a GGUF file, for llama.cpp: `gguf_llama.py FOLDER FILE F32|BF16`.

A script of its own, because it runs in the peer's environment (requirements/peers-llama-cpp-python.txt), not in ours.
A byte-level BPE vocabulary goes into the file where the folder has one: llama.cpp's server answers with text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
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


def read_safetensors(path: Path) -> Iterator[tuple[str, Array]]:
    """Each tensor as float32. The file is eight bytes of length, that much JSON, then the tensors.

    Read here and not by the safetensors package, whose numpy side knows no bfloat16.

    Raises:
        ValueError: a tensor that is not of a float type.
    """
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            file.seek(start + begin)
            yield name, to_float32(file.read(end - begin), entry["dtype"]).reshape(entry["shape"])


def to_float32(data: bytes, dtype: str) -> Array:
    """A bfloat16 is the upper half of a float32.

    Raises:
        ValueError: not a float type.
    """
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype not in ("F32", "F16"):
        raise ValueError(f"{dtype} is not a type that can be converted")
    return np.frombuffer(data, "<f4" if dtype == "F32" else "<f2").astype(np.float32)


def read_vocabulary(file: Path) -> tuple[list[str], list[str], set[str]]:
    """Tokens by id, merges as `left right`, and special tokens, of a byte-level BPE tokenizer.json.

    Raises:
        ValueError: another kind of tokenizer, or ids with gaps.
    """
    document = json.loads(file.read_text(encoding="utf-8"))
    model, added = document["model"], document.get("added_tokens") or []
    ids: dict[str, int] = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
    tokens = sorted(ids, key=lambda token: ids[token])
    if model["type"] != "BPE" or [ids[token] for token in tokens] != list(range(len(tokens))):
        raise ValueError(f"{file.name} is not a BPE vocabulary without gaps")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return tokens, merges, {token["content"] for token in added if token.get("special")}


def add_vocabulary(writer: Any, file: Path) -> None:
    """Write the vocabulary of `file`, or that there is none."""
    import gguf

    if not file.exists():
        writer.add_tokenizer_model("no_vocab")
        return
    tokens, merges, special = read_vocabulary(file)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if one in special else gguf.TokenType.NORMAL for one in tokens])
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)


def convert(folder: Path, file: Path, form: str) -> None:
    """Write `file`, vectors always in float32. Needs the package gguf.

    Args:
        form: of matrices, `F32` or `BF16`.

    Raises:
        ValueError: the model is not a plain Llama.
    """
    import gguf

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
    add_vocabulary(writer, folder / "tokenizer.json")
    matrix_type = gguf.GGMLQuantizationType[form]
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if form == "BF16" else gguf.LlamaFileType.ALL_F32)
    for shard in sorted(folder.glob("*.safetensors")):
        for name, weight in read_safetensors(shard):
            target = gguf_name(name)
            if target is None:
                continue
            if name.endswith("q_proj.weight"):
                weight = interleave_rotary_halves(weight, heads)
            elif name.endswith("k_proj.weight"):
                weight = interleave_rotary_halves(weight, kv_heads)
            if weight.ndim == 2 and form != "F32":
                writer.add_tensor(target, gguf.quants.quantize(weight, matrix_type), raw_dtype=matrix_type)
            else:
                writer.add_tensor(target, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
