"""Compare a checkpoint's tensors, as their headers count them, with those that its config.json describes. Pure.

    16 or 32 bit    the number of weights, so that a file in float32 whose config.json says bfloat16 passes: it is
                    served in the format that config.json names
    GGUF            the number of weights, because every tensor may be quantised, tables too
    quantised       the bytes of all tensors, with scales, and with 16 bit for what the format leaves alone

The tensors of the chosen files count (`sources/selection.py`: those of the index), not the files of the repository. So
a second copy of the weights (`consolidated.safetensors`, `original/`) does not matter. A head that is tied to the
embedding may be stored or not; the heads that draft tokens (MTP) may be there or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from millstream_operator.catalog.config_fields import CURE
from millstream_operator.catalog.model_shape import ModelShape

TOLERANCE_PERCENT = 3
FLOATS = ("F64", "F32", "F16", "BF16")
SMALLEST_PARAMETERS = 1 << 20  # below it, position tables and paddings weigh as much as a layer
_LARGEST = 1 << 62


@dataclass(frozen=True, slots=True)
class CountedWeights:
    """`floats`: elements of floating-point tensors of 16 bit and more; masks and packed integers are none.

    `elements`: of all tensors.
    """

    tensor_bytes: int
    floats: int
    elements: int
    has_head: bool


def read_weights(weights: Mapping[str, Any]) -> CountedWeights | None:
    """`weights` of an inspection; None where nothing was counted (a config.json alone, or an invalid answer)."""
    tensor_bytes, by_dtype = weights.get("tensor_bytes"), weights.get("elements_by_dtype")
    if not _is_count(tensor_bytes) or not isinstance(by_dtype, Mapping):
        return None
    floats = sum(count for dtype, count in by_dtype.items() if dtype in FLOATS and _is_count(count))
    elements = sum(count for count in by_dtype.values() if _is_count(count))
    return CountedWeights(tensor_bytes, floats, elements, has_head=weights.get("tied_lm_head") is not True)


def size_problem(shape: ModelShape, counted: CountedWeights, *, is_part: bool = False) -> str | None:
    """Return one line with both figures where they differ by more than `TOLERANCE_PERCENT`; None where they agree.

    `is_part`: the shape is the language model of a model that has other parts, so the files may hold more.
    """
    tables = shape.parameters.embedding * (2 if counted.has_head else 1)
    rest = shape.parameters.total - shape.parameters.embedding - shape.parameters.head
    if rest + tables < SMALLEST_PARAMETERS:
        return None
    is_gguf = shape.quantization is not None and shape.quantization.method == "GGUF"
    if shape.quantization is None or is_gguf:
        described, extra = rest + tables, shape.extra_parameters
        found = counted.elements if is_gguf else counted.floats
        described, extra, found = (number * shape.weight_bytes for number in (described, extra, found))
    else:
        described = _quantized_bytes(shape, tables)
        extra, found = shape.extra_parameters * shape.weight_bytes, counted.tensor_bytes
    low, high = described * (100 - TOLERANCE_PERCENT), (described + extra) * (100 + TOLERANCE_PERCENT)
    if low <= found * 100 and (is_part or found * 100 <= high):
        return None
    stored = shape.quantization.words if shape.quantization is not None else f"{8 * shape.weight_bytes} bit"
    return (
        f"config.json describes {_gb(described)} of weights ({_billions(shape)} in {stored}), and the weights files "
        f"hold {_gb(found)}: more than {TOLERANCE_PERCENT} % apart, so they do not belong together. {CURE}"
    )


def _quantized_bytes(shape: ModelShape, tables: int) -> int:
    """Bytes of all tensors: quantised layers with their scales, the rest in the checkpoint's own width."""
    stored, p = shape.quantization, shape.parameters
    assert stored is not None  # noqa: S101 - the caller asked
    quantized = p.linear - shape.unquantized_parameters
    plain = (shape.unquantized_parameters + p.norms + p.routers + tables) * shape.weight_bytes
    return plain + quantized * stored.bits // 8 + _scales_bytes(shape, quantized)


def _scales_bytes(shape: ModelShape, quantized: int) -> int:
    stored = shape.quantization
    assert stored is not None  # noqa: S101 - the caller asked
    if stored.method == "NF4":
        return quantized // 64 + quantized // 16384 * 4 if stored.double_quant else quantized // 64 * 4
    if stored.method in ("AWQ", "GPTQ"):
        groups = -(-quantized // (stored.group_size or shape.hidden_size))
        return groups * 2 + groups * stored.bits // 8
    return quantized // 4096 * 4


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def _billions(shape: ModelShape) -> str:
    return f"{shape.parameters.total / 1e9:.2f} billion"
