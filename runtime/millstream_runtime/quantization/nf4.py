"""bitsandbytes' NF4 (Dettmers et al. 2023, arXiv 2305.14314): 4-bit codes of a table, a scale for 64 weights.

    weight                                   uint8 [out * in / 2, 1]   row after row, the first of two in the high half
    weight.absmax                            float32 [blocks]          the largest weight of 64 that follow one another
    weight.quant_map                         float32 [16]              the table
    weight.quant_state.bitsandbytes__nf4     JSON in bytes             shape, block size, and what follows

Double quantization stores the scales in 8 bits. They are computed once, when the layer is loaded:

    weight.absmax                            uint8 [blocks]
    weight.nested_quant_map                  float32 [256]
    weight.nested_absmax                     float32 [blocks / 256]
    scale = nested_quant_map[absmax] * nested_absmax + nested_offset

Where a row is no multiple of 64 long, a block goes on in the next row; groups of inputs are then shorter than a block.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from millstream_runtime.models.linear.shares import Cut, Size, kept_size, total_size
from millstream_runtime.quantization.quantized_layout import (
    QuantizedLayout,
    Unpacked,
    groups_within,
    invalid_tensor,
    packed,
    span_of,
)
from millstream_runtime.quantization.weight_layout import TensorSource

BLOCK, NESTED_BLOCK = 64, 256
SCALE_BYTES = 4
STATE = "quant_state.bitsandbytes__nf4"
# fmt: off
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on


@dataclass(frozen=True)
class Nf4Layout(QuantizedLayout):
    """See `formats.Nf4Format`."""

    double_quant: bool
    bits = 4
    code_values: ClassVar[tuple[float, ...]] = NF4_VALUES

    def unpack(self, source: TensorSource, module: str, outputs: Size, inputs: Size) -> Unpacked | None:
        num_outputs, num_inputs = total_size(outputs), total_size(inputs)
        row_bytes = total_size(packed(num_inputs, 2, module))
        name = f"{module}.weight"
        num_blocks = -(-num_outputs * num_inputs // BLOCK)
        stored = source.read(name, (_bytes_of_rows(outputs, row_bytes), 1), ("U8",))
        table = source.read(f"{name}.quant_map", (len(NF4_VALUES),), ("F32",))
        state = source.read_document(f"{name}.{STATE}")
        scales = self._scales(source, name, num_blocks, state)
        if state is None or scales is None:
            return None
        _check_state(f"{name}.{STATE}", state, [num_outputs, num_inputs])
        if not torch.allclose(table, torch.tensor(NF4_VALUES), rtol=0, atol=1e-6):
            raise invalid_tensor(f"{name}.quant_map", "is not the table of NF4")
        first, last, _ = span_of(inputs)
        codes = torch.stack((stored >> 4, stored & 15), dim=1).view(kept_size(outputs), num_inputs)[:, first:last]
        group_size = math.gcd(num_inputs, BLOCK)
        starts = torch.arange(first // group_size, -(-last // group_size)) * group_size
        blocks = (starts.unsqueeze(1) + _rows(outputs).unsqueeze(0) * num_inputs) // BLOCK  # [groups, out]
        _, group_of_input = groups_within(inputs, group_size)
        return Unpacked(codes.t().contiguous(), scales[blocks], f"{name}.absmax", 0, group_of_input)

    def planned_bytes(self, outputs: Size, inputs: Size) -> int:
        groups, _ = groups_within(inputs, math.gcd(total_size(inputs), BLOCK))
        return kept_size(outputs) * kept_size(inputs) // 2 + kept_size(groups) * kept_size(outputs) * SCALE_BYTES

    def _scales(self, source: TensorSource, name: str, num_blocks: int, state: dict[str, Any] | None) -> Tensor | None:
        """Of all blocks, float32."""
        if not self.double_quant:
            scales = source.read(f"{name}.absmax", (num_blocks,), ("F32",))
            return None if state is None else scales
        codes = source.read(f"{name}.absmax", (num_blocks,), ("U8",))
        table = source.read(f"{name}.nested_quant_map", (256,), ("F32",))
        outer = source.read(f"{name}.nested_absmax", (-(-num_blocks // NESTED_BLOCK),), ("F32",))
        if state is None:
            return None
        offset = _number(f"{name}.{STATE}", state, "nested_offset")
        if state.get("nested_blocksize") != NESTED_BLOCK:
            raise _wrong(f"{name}.{STATE}", state, "nested_blocksize", NESTED_BLOCK)
        return table[codes.int()] * outer.repeat_interleave(NESTED_BLOCK)[:num_blocks] + offset


def _bytes_of_rows(outputs: Size, row_bytes: int) -> Size:
    if isinstance(outputs, int):
        return outputs * row_bytes
    kept = tuple(range(one.start * row_bytes, one.stop * row_bytes) for one in outputs.kept)
    return Cut(outputs.total * row_bytes, kept)


def _rows(outputs: Size) -> Tensor:
    """Numbers of the kept outputs, int64."""
    kept = [range(outputs)] if isinstance(outputs, int) else [*outputs.kept]
    return torch.cat([torch.arange(one.start, one.stop) for one in kept])


def _check_state(name: str, state: dict[str, Any], shape: list[int]) -> None:
    for field, expected in (("quant_type", "nf4"), ("blocksize", BLOCK), ("shape", shape)):
        if state.get(field) != expected:
            raise _wrong(name, state, field, expected)


def _number(name: str, state: dict[str, Any], field: str) -> float:
    value = state.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise _wrong(name, state, field, "a number")
    return float(value)


def _wrong(name: str, state: dict[str, Any], field: str, expected: object) -> Exception:
    found = json.dumps(state.get(field))
    return invalid_tensor(name, f"says {field} {found[:60]}; it must be {json.dumps(expected)}")
