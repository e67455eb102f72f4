"""`quantization_config` of a config.json -> how the checkpoint's weights are stored.

Both spellings of the field are read (`bits` | `w_bit`, `group_size` | `q_group_size`). A checkpoint that is already
quantised decides: nothing can give back the bits that it lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_GROUP_SIZE = 128


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """`method` as the API names it; `group_size` counts weights along the input dimension, None: a row or block."""

    method: str  # AWQ | GPTQ | FP8 | INT8 | NF4 | RTN
    bits: int
    group_size: int | None


class UnknownQuantizationError(ValueError):
    """A method that the planner does not know. `str()` is one sentence."""


def read_quantization(config: Mapping[str, Any]) -> CheckpointQuantization | None:
    """None for a checkpoint of plain 16- or 32-bit weights.

    Raises:
        UnknownQuantizationError: the method is not known.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(found, Mapping) or not found:
        return None
    method = str(found.get("quant_method", "")).lower()
    bits = _integer(found, 4, "bits", "w_bit")
    group = _group(_integer(found, DEFAULT_GROUP_SIZE, "group_size", "q_group_size"))
    if method == "awq":
        return CheckpointQuantization("AWQ", bits, group)
    if method == "gptq":
        return CheckpointQuantization("GPTQ", bits, group)
    if method in ("fp8", "fbgemm_fp8"):
        return CheckpointQuantization("FP8", 8, None)
    if method == "bitsandbytes":
        four = bool(found.get("load_in_4bit"))
        return CheckpointQuantization("NF4", 4, 64) if four else CheckpointQuantization("INT8", 8, None)
    if method in ("compressed-tensors", "sparseml"):
        return _compressed_tensors(found)
    raise UnknownQuantizationError(
        f"quantization_config.quant_method is {method or 'missing'!r}; known are awq, gptq, fp8, bitsandbytes and "
        "compressed-tensors."
    )


def _compressed_tensors(found: Mapping[str, Any]) -> CheckpointQuantization:
    groups = found.get("config_groups")
    first: Any = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    weights = first.get("weights") if isinstance(first, Mapping) else None
    weights = weights if isinstance(weights, Mapping) else {}
    bits = _integer(weights, 8, "num_bits")
    if str(weights.get("type")) == "float":
        return CheckpointQuantization("FP8", bits, None)
    if bits <= 4:
        return CheckpointQuantization("GPTQ", bits, _group(_integer(weights, DEFAULT_GROUP_SIZE, "group_size")))
    return CheckpointQuantization("INT8", bits, None)


def _group(size: int) -> int | None:
    return size if size > 0 else None  # -1: one group a row


def _integer(found: Mapping[str, Any], default: int, *names: str) -> int:
    for name in names:
        value = found.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and -1 <= value <= 1 << 20:
            return value
    return default
