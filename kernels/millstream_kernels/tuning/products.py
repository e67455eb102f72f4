"""One product of each linear kernel over random weights, as an engine starts it, for `tune`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from millstream_kernels.linear.int4_weight import TILE, Int4Weight
from millstream_kernels.linear.nf4 import GROUP, Nf4Weight, nf4_linear
from millstream_kernels.linear.w4a16 import w4a16_linear
from millstream_kernels.linear.w8a8 import w8a8_linear
from millstream_kernels.linear.w8a16 import w8a16_linear
from millstream_kernels.linear.w16a16 import w16a16_linear

Product = Callable[[], Tensor]
Make = Callable[[int, int, int, torch.device], Product]  # rows, outputs, inputs
SCALE_AND_ZERO = 0x0008_2000  # a zero point of 8 above a scale of 2**-7 in float16


def _w16a16(num_rows: int, num_outputs: int, num_inputs: int, device: torch.device) -> Product:
    x, weight = _numbers(num_rows, num_inputs, device), _numbers(num_outputs, num_inputs, device)
    return lambda: w16a16_linear(x, weight)


def _w8a16(num_rows: int, num_outputs: int, num_inputs: int, device: torch.device) -> Product:
    x, codes = _numbers(num_rows, num_inputs, device), _codes(num_outputs, num_inputs, torch.int8, device)
    scales = torch.rand(1, num_outputs, device=device)
    return lambda: w8a16_linear(x, codes, scales)


def _w8a8(num_rows: int, num_outputs: int, num_inputs: int, device: torch.device) -> Product:
    """In INT8: FP8 has tiles of as many bytes, and takes the same choice."""
    x, codes = (_codes(rows, num_inputs, torch.int8, device) for rows in (num_rows, num_outputs))
    x_scales, scales = torch.rand(num_rows, device=device), torch.rand(num_outputs, device=device)
    return lambda: w8a8_linear(x, x_scales, codes, scales)


def _nf4(num_rows: int, num_outputs: int, num_inputs: int, device: torch.device) -> Product:
    x, codes = _numbers(num_rows, num_inputs, device), _codes(num_outputs, num_inputs // 2, torch.uint8, device)
    absmax = torch.rand(num_outputs, num_inputs // GROUP, device=device)
    weight = Nf4Weight(codes, absmax, torch.linspace(-1, 1, 16, device=device))
    return lambda: nf4_linear(x, weight)


def _w4a16(group_size: int) -> Make:
    def make(num_rows: int, num_outputs: int, num_inputs: int, device: torch.device) -> Product:
        tiles = (num_outputs // TILE, num_inputs // TILE)
        codes = torch.randint(-(2**31), 2**31, (*tiles, TILE, 16), dtype=torch.int32, device=device)
        shape = (tiles[0], num_inputs // group_size, TILE)
        groups = torch.full(shape, SCALE_AND_ZERO, dtype=torch.int32, device=device)
        weight = Int4Weight(codes, groups, num_outputs, num_inputs, group_size, torch.float16, None)
        x = _numbers(num_rows, num_inputs, device)
        return lambda: w4a16_linear(x, weight)

    return make


PRODUCTS: dict[str, Make] = {
    "w16a16": _w16a16,
    "w8a16": _w8a16,
    "w8a8": _w8a8,
    "nf4": _nf4,
    "w4a16": _w4a16(TILE),
    "w4a16-small-groups": _w4a16(32),
}


def _numbers(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.bfloat16, device=device)


def _codes(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    limits = torch.iinfo(dtype)
    return torch.randint(max(limits.min, -127), limits.max + 1, (rows, columns), dtype=dtype, device=device)
