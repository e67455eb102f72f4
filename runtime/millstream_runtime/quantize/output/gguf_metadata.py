"""The metadata of a GGUF file from a Hugging Face folder: sizes, rotary embedding, vocabulary. The inverse of
`gguf/config_values.py` and `gguf/tokenizer_files.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.gguf.special_tokens import END_FIELDS
from millstream_runtime.gguf.tokenizer_files import CONTROL, PRE_TOKENIZERS, USER_DEFINED
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.config.rope_config import RopeConfig, yarn_mscale

# Architectures of llama.cpp by `model_type`.
ARCHITECTURE_OF = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
FILE_TYPES = {"Q8_0": 7, "Q4_K": 14}
NORMAL, UNUSED = 1, 5  # token types
ROPE_TYPES = ("default", "linear", "yarn", "llama3")


def check_convertible(values: Mapping[str, Any], config: ModelConfig) -> None:
    """Raises InvalidConfigError: no GGUF file that this version writes could hold the model; names the field."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURE_OF:
        raise InvalidConfigError(
            f"--method gguf: model_type {kind!r:.40} is not written yet; this version writes: "
            f"{', '.join(ARCHITECTURE_OF)}."
        )
    if values.get("sliding_window") and values.get("use_sliding_window", True):
        raise InvalidConfigError("--method gguf: models with sliding_window are not written yet.")
    rope = config.rope
    if rope.type not in ROPE_TYPES:
        raise InvalidConfigError(
            f"--method gguf: rope_type {rope.type!r:.40} is not written; this version writes: {', '.join(ROPE_TYPES)}."
        )
    wanted = _plain_yarn(rope)
    for name in ("beta_fast", "beta_slow", "truncate", "mscale_all_dim", "attention_factor"):
        found, usual = getattr(rope, name), getattr(wanted, name)
        if rope.type == "yarn" and not math.isclose(found, usual, rel_tol=1e-6):
            raise InvalidConfigError(
                f"--method gguf: yarn's {name} {found:g} is not written yet; this version writes {usual:g}."
            )


def model_fields(arch: str, config: ModelConfig, type_name: str, name: str) -> dict[str, Any]:
    """All but the vocabulary. `arch`: of llama.cpp."""
    rope = config.rope
    fields: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope.theta,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    if rope.type in ("linear", "yarn"):
        fields |= {"rope.scaling.type": rope.type, "rope.scaling.factor": rope.factor}
    if rope.type == "yarn":
        fields["rope.scaling.original_context_length"] = rope.original_max_position_embeddings
    general = {
        "general.architecture": arch,
        "general.name": name,
        "general.quantization_version": 2,
        "general.file_type": FILE_TYPES[type_name],
    }
    return general | {f"{arch}.{field}": value for field, value in fields.items()}


def rope_factors(config: ModelConfig) -> list[float]:
    """By which Llama 3 divides the frequency of each pair of a head; empty for other models."""
    rope = config.rope
    if rope.type != "llama3":
        return []
    low, high = rope.low_freq_factor, rope.high_freq_factor
    found = []
    for index in range(0, config.head_dim, 2):
        wavelength = 2 * math.pi * rope.theta ** (index / config.head_dim)
        smooth = min(1.0, max(0.0, (rope.original_max_position_embeddings / wavelength - low) / (high - low)))
        found.append(1 / ((1 - smooth) / rope.factor + smooth))
    return found


def _plain_yarn(rope: RopeConfig) -> RopeConfig:
    """What llama.cpp computes where a file has the factor alone."""
    return RopeConfig(theta=rope.theta, type="yarn", attention_factor=yarn_mscale(rope.factor))


def vocabulary_fields(folder: Path, values: Mapping[str, Any], size: int) -> dict[str, Any] | None:
    """A byte-level BPE vocabulary of `size` tokens; None for any other, or one whose pre-tokenizer llama.cpp has no
    name for.

    Raises:
        RuntimeFailure: CheckpointInvalid, tokenizer.json or the chat template cannot be read.
    """
    try:
        return _vocabulary(folder, values, size)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RuntimeFailure(
            FailureReason.CHECKPOINT_INVALID,
            f"{folder}: tokenizer.json or chat_template.jinja cannot be read ({str(error)[:80]}); fetch them again.",
        ) from None


def _vocabulary(folder: Path, values: Mapping[str, Any], size: int) -> dict[str, Any] | None:
    file = folder / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    model, pre = document.get("model") or {}, _pre_tokenizer(document)
    if model.get("type") != "BPE" or model.get("byte_fallback") or pre is None:
        return None
    added = {one["id"]: one for one in document.get("added_tokens") or []}
    names = {number: token for token, number in model["vocab"].items()}
    names |= {number: one["content"] for number, one in added.items()}
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
    fields |= dict(zip(("bos_token_id",), _token_ids(values.get("bos_token_id"), size), strict=False))
    fields |= dict(zip(END_FIELDS, _token_ids(values.get("eos_token_id"), size), strict=False))
    found = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    template = folder / "chat_template.jinja"
    if template.is_file():
        found["tokenizer.chat_template"] = template.read_text(encoding="utf-8")
    return found


def _token_ids(value: object, size: int) -> list[int]:
    """One or several, without what is no token."""
    return [one for one in (value if isinstance(value, list) else [value]) if type(one) is int and 0 <= one < size]


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
