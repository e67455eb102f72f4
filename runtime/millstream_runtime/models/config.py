"""config.json -> ModelConfig: the shape of a model, read without importing it and checked field by field.

`transformers` 5 writes `rope_parameters` and `dtype`; older folders have `rope_theta`, `rope_scaling` and
`torch_dtype`. Both are read. Nothing here executes code from the folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_runtime.errors import Reason, RuntimeFailure

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
SUPPORTED_ROPE_TYPES = ("default", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base frequency and, for `llama3`, how long wavelengths are stretched."""

    theta: float
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one model. Lengths in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    checkpoint_dtype: str  # what the folder says its weights are; the loader trusts the files instead
    max_position_embeddings: int
    eos_token_ids: frozenset[int]
    max_model_len: int  # prompt and answer together; starts as max_position_embeddings, the engine may lower it

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token keeps in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


def load_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` and, where it exists, `generation_config.json`.

    Raises:
        RuntimeFailure: CheckpointInvalid (no folder, unreadable JSON, a field missing or impossible) or
            UnsupportedByRuntime (another architecture, activation, rope type, or a quantised checkpoint).
    """
    if not folder.is_dir():
        raise RuntimeFailure(
            Reason.CHECKPOINT_INVALID,
            f"Model folder {folder} does not exist; name a folder with config.json and *.safetensors.",
        )
    fields = _Fields(folder / "config.json")
    architecture = _architecture(fields)
    _refuse_unsupported(fields)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        checkpoint_dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        eos_token_ids=_eos_token_ids(folder, fields),
        max_model_len=fields.integer("max_position_embeddings", 2048),
    )
    if config.num_heads % config.num_kv_heads:
        raise fields.invalid(
            "num_key_value_heads", f"{config.num_kv_heads}; it must divide num_attention_heads ({num_heads})"
        )
    if config.head_dim % 2:
        raise fields.invalid("head_dim", f"{config.head_dim}; rotary embedding needs an even number")
    return config


def _architecture(fields: _Fields) -> str:
    names = fields.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise fields.invalid("architectures", f'{names!r}; it must be a list such as ["LlamaForCausalLM"]')
    if names[0] not in SUPPORTED_ARCHITECTURES:
        raise RuntimeFailure(
            Reason.UNSUPPORTED_BY_RUNTIME,
            f"{fields.path}: architecture {names[0]!r} is not supported by this runtime; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}.",
        )
    return str(names[0])


def _refuse_unsupported(fields: _Fields) -> None:
    quantization = fields.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise fields.unsupported("quantization_config.quant_method", method, "unquantised weights")
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.unsupported("hidden_act", fields.get("hidden_act"), "silu")
    if fields.get("sliding_window") is not None and fields.get("use_sliding_window", True):
        raise fields.unsupported("sliding_window", fields.get("sliding_window"), "full attention")


def _rope(fields: _Fields) -> RopeConfig:
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise fields.invalid("rope_parameters", f"{scaling!r}; it must be an object")
    rope = _Fields(fields.path, scaling, prefix="rope_parameters.")
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in SUPPORTED_ROPE_TYPES:
        raise fields.unsupported("rope_type", kind, ", ".join(SUPPORTED_ROPE_TYPES))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.unsupported("partial_rotary_factor", scaling["partial_rotary_factor"], "1.0")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    return RopeConfig(
        theta=theta,
        type=kind,
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
    )


def _eos_token_ids(folder: Path, fields: _Fields) -> frozenset[int]:
    """Ids that end a generation: generation_config.json (chat models list several there), else config.json."""
    value = fields.get("eos_token_id")
    path = fields.path
    if (folder / "generation_config.json").is_file():
        generation = _Fields(folder / "generation_config.json")
        if generation.get("eos_token_id") is not None:
            value, path = generation.get("eos_token_id"), generation.path
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise RuntimeFailure(
            Reason.CHECKPOINT_INVALID, f"{path}: eos_token_id is {value!r}; it must be an integer or a list of them."
        )
    return frozenset(ids)


class _Fields:
    """One JSON object with typed reads that fail by one sentence naming file, field and value."""

    def __init__(self, path: Path, values: dict[str, Any] | None = None, prefix: str = "") -> None:
        self.path = path
        self._prefix = prefix
        self._values = values if values is not None else _read_json_object(path)

    def get(self, name: str, default: object = None) -> Any:
        return self._values.get(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.invalid(name, f"{value!r}; it must be a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.invalid(name, f"{value!r}; it must be a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._values.get(name) or False
        if not isinstance(value, bool):
            raise self.invalid(name, f"{value!r}; it must be true or false")
        return value

    def invalid(self, name: str, what: str) -> RuntimeFailure:
        return RuntimeFailure(Reason.CHECKPOINT_INVALID, f"{self.path}: {self._prefix}{name} is {what}.")

    def unsupported(self, name: str, value: object, supported: str) -> RuntimeFailure:
        return RuntimeFailure(
            Reason.UNSUPPORTED_BY_RUNTIME,
            f"{self.path}: {name} {value!r} is not supported by this runtime; supported: {supported}.",
        )


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RuntimeFailure(
            Reason.CHECKPOINT_INVALID, f"{path} does not exist; a model folder needs it beside its *.safetensors."
        ) from None
    except (OSError, ValueError) as error:
        raise RuntimeFailure(Reason.CHECKPOINT_INVALID, f"{path} is not readable JSON: {error}.") from error
    if not isinstance(values, dict):
        raise RuntimeFailure(Reason.CHECKPOINT_INVALID, f"{path} must hold a JSON object.")
    return values
