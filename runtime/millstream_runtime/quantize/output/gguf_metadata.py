"""The metadata of a GGUF file from a Hugging Face folder: sizes, rotary embedding, vocabulary. The inverse of
`gguf/config_values.py` and `gguf/tokenizer_files.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millstream_runtime.context_limit import rope_fields
from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.gguf.tokenizer_files import CONTROL, PRE_TOKENIZERS, USER_DEFINED

# Architectures of llama.cpp by `model_type`.
ARCHITECTURE_OF = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
FILE_TYPES = {"Q8_0": 7, "Q4_K": 14}
NORMAL, UNUSED = 1, 5  # token types
ROPE_TYPES = ("default", "linear", "yarn", "llama3")


def check_convertible(values: Mapping[str, Any]) -> None:
    """Raises InvalidConfigError: no GGUF file that this version writes could hold the model; names the field."""
    kind = values.get("model_type")
    if kind not in ARCHITECTURE_OF:
        raise InvalidConfigError(
            f"--method gguf: model_type {kind!r:.40} is not written yet; this version writes: "
            f"{', '.join(ARCHITECTURE_OF)}."
        )
    if values.get("sliding_window") and values.get("use_sliding_window", True):
        raise InvalidConfigError("--method gguf: models with sliding_window are not written yet.")
    rope = _rope(values)
    name = rope.get("rope_type", rope.get("type", "default"))
    if name not in ROPE_TYPES:
        raise InvalidConfigError(
            f"--method gguf: rope_type {name!r:.40} is not written; this version writes: {', '.join(ROPE_TYPES)}."
        )


def model_fields(values: Mapping[str, Any], type_name: str, name: str) -> dict[str, Any]:
    """All but the vocabulary. `values`: of config.json, checked."""
    arch = ARCHITECTURE_OF[values["model_type"]]
    heads = values["num_attention_heads"]
    head_dim = head_dim_of(values)
    fields: dict[str, Any] = {
        "context_length": values["max_position_embeddings"],
        "embedding_length": values["hidden_size"],
        "block_count": values["num_hidden_layers"],
        "feed_forward_length": values["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": values.get("num_key_value_heads") or heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(values.get("rms_norm_eps", 1e-6)),
        "rope.freq_base": _theta(values),
        "rope.dimension_count": head_dim,
        "vocab_size": values["vocab_size"],
    }
    rope = _rope(values)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("linear", "yarn"):
        fields |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        original = rope.get("original_max_position_embeddings")
        fields |= {"rope.scaling.original_context_length": original} if original else {}
    general = {
        "general.architecture": arch,
        "general.name": name,
        "general.quantization_version": 2,
        "general.file_type": FILE_TYPES[type_name],
    }
    return general | {f"{arch}.{field}": value for field, value in fields.items()}


def rope_factors(values: Mapping[str, Any]) -> list[float]:
    """By which Llama 3 divides the frequency of each pair of a head; empty for other models."""
    rope, head_dim = _rope(values), head_dim_of(values)
    if rope.get("rope_type", rope.get("type")) != "llama3":
        return []
    factor, low, high = (float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = rope["original_max_position_embeddings"]
    found = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * _theta(values) ** (index / head_dim)
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def vocabulary_fields(folder: Path, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """A byte-level BPE vocabulary; None for any other, or one whose pre-tokenizer llama.cpp has no name for."""
    file = folder / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    model, pre = document.get("model") or {}, _pre_tokenizer(document)
    if model.get("type") != "BPE" or model.get("byte_fallback") or pre is None:
        return None
    added = {one["id"]: one for one in document.get("added_tokens") or []}
    names = {number: token for token, number in model["vocab"].items()}
    names |= {number: one["content"] for number, one in added.items()}
    size = values["vocab_size"]
    kinds = {number: CONTROL if one.get("special") else USER_DEFINED for number, one in added.items()}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [names.get(number, f"[PAD{number}]") for number in range(size)],
        "token_type": [kinds.get(number, NORMAL if number in names else UNUSED) for number in range(size)],
        "add_bos_token": _adds_bos(document),
    }
    fields |= {"merges": merges} if merges else {}
    for name in ("bos_token_id", "eos_token_id"):
        found = values.get(name)
        first = found[0] if isinstance(found, list) and found else found
        fields |= {name: first} if isinstance(first, int) else {}
    found = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    template = folder / "chat_template.jinja"
    if template.is_file():
        found["tokenizer.chat_template"] = template.read_text(encoding="utf-8")
    return found


def head_dim_of(values: Mapping[str, Any]) -> int:
    return int(values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"])


def _rope(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return rope_fields(values.get("rope_parameters"), values.get("rope_scaling"))


def _theta(values: Mapping[str, Any]) -> float:
    return float(_rope(values).get("rope_theta") or values.get("rope_theta") or 10_000.0)


def _pre_tokenizer(document: Mapping[str, Any]) -> str | None:
    """llama.cpp's name for how a text is cut before merges."""
    found = document.get("pre_tokenizer") or {}
    steps = found.get("pretokenizers", [found])
    kinds = [one.get("type") for one in steps]
    if "ByteLevel" not in kinds or any(one.get("add_prefix_space") for one in steps):
        return None
    own_pattern = PRE_TOKENIZERS["gpt-2"].pattern if steps[kinds.index("ByteLevel")].get("use_regex", True) else None
    patterns = [one["pattern"].get("Regex") for one in steps if one.get("type") == "Split"] or [own_pattern]
    digits = any(one.get("type") == "Digits" and one.get("individual_digits") for one in steps)
    normalizer = (document.get("normalizer") or {}).get("type")
    ignores = bool((document.get("model") or {}).get("ignore_merges"))
    for name, known in PRE_TOKENIZERS.items():
        wanted = ([known.pattern], known.single_digits, known.normal_form, known.ignore_merges)
        if wanted == (patterns, digits, normalizer, ignores):
            return name
    return None


def _adds_bos(document: Mapping[str, Any]) -> bool:
    """Whether a prompt begins with a special token."""
    processor = document.get("post_processor") or {}
    steps = processor.get("processors", [processor])
    return any("SpecialToken" in (one.get("single") or [{}])[0] for one in steps)
