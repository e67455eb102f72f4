"""Blocks of GGUF files as codes and scales of `millstream_kernels.cpu.integer.weight`, nothing of them rounded.

Scales of 6 bits become bytes, so a block of Q4_K takes 148 bytes for the file's 144, and one of Q5_K 180 for 176; the
others take what they take in the file. The weight that Q4_1 and Q5_1 add is held negative, for kernels subtract it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from millstream_kernels.cpu.integer.layouts import FORMATS
from millstream_kernels.cpu.integer.weight import IntegerWeight, OutputCodes, empty_weight
from millstream_runtime.quantization.block_weight import BlockWeight
from millstream_runtime.quantization.gguf_blocks import fifth_bits, halves_of_bytes, planes, six_bit_scales

OUTPUTS_AT_ONCE = 16
MOST_ELEMENTS = 1 << 21  # unpacked at once


def integer_weight(weight: BlockWeight) -> IntegerWeight:
    """Return the weight of blocks whose type is one of `integer.layouts.FORMATS`."""
    made = empty_weight(FORMATS[weight.kind.name], weight.num_outputs, weight.num_inputs)
    step = max(1, MOST_ELEMENTS // (OUTPUTS_AT_ONCE * weight.num_inputs)) * OUTPUTS_AT_ONCE
    for first in range(0, weight.num_outputs, step):
        rows = weight.stored[first : first + step]
        made.write(_unpacked(rows, weight), first)
    return made


def _unpacked(rows: Tensor, weight: BlockWeight) -> OutputCodes:
    kind = FORMATS[weight.kind.name].scales
    blocks = rows.reshape(-1, weight.kind.block_bytes)
    codes, halves, small = _BY_NAME[weight.kind.name](blocks)
    count = len(rows)
    return OutputCodes(
        codes.reshape(count, weight.num_inputs),
        halves.reshape(count, -1, kind.num_halves, 2),
        small.reshape(count, weight.num_inputs // kind.inputs, -1),
    )


Parts = tuple[Tensor, Tensor, Tensor]


def _nothing(blocks: Tensor) -> Tensor:
    return blocks[:, :0]


def _negative(halves: Tensor) -> Tensor:
    """Bytes of a float16 `[n, 2]` with the other sign."""
    return halves ^ torch.tensor([0, 0x80], dtype=torch.uint8)


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:] ^ 0x80, blocks[:, :2], _nothing(blocks)


def _q4_0(blocks: Tensor) -> Parts:
    return halves_of_bytes(blocks[:, 2:]), blocks[:, :2], _nothing(blocks)


def _q4_1(blocks: Tensor) -> Parts:
    halves = torch.cat((blocks[:, :2], _negative(blocks[:, 2:4])), 1)
    return halves_of_bytes(blocks[:, 4:]), halves, _nothing(blocks)


def _q5_0(blocks: Tensor) -> Parts:
    return halves_of_bytes(blocks[:, 6:]) | fifth_bits(blocks, 2), blocks[:, :2], _nothing(blocks)


def _q5_1(blocks: Tensor) -> Parts:
    halves = torch.cat((blocks[:, :2], _negative(blocks[:, 2:4])), 1)
    return halves_of_bytes(blocks[:, 8:]) | fifth_bits(blocks, 4), halves, _nothing(blocks)


def _small(blocks: Tensor) -> Tensor:
    """Of each of eight groups scale and least, `[n, 16]`."""
    scales, least = six_bit_scales(blocks[:, 4:16])
    return torch.stack((scales, least), 2).flatten(1)


def _q4_k(blocks: Tensor) -> Parts:
    return planes(blocks[:, 16:].contiguous(), 32, 15, range(0, 8, 4)), blocks[:, :4], _small(blocks)


def _q5_k(blocks: Tensor) -> Parts:
    low = planes(blocks[:, 48:].contiguous(), 32, 15, range(0, 8, 4))
    high = planes(blocks[:, 16:48].contiguous(), 32, 1, range(8))
    return low | (high << 4), blocks[:, :4], _small(blocks)


def _q6_k(blocks: Tensor) -> Parts:
    low = planes(blocks[:, :128].contiguous(), 64, 15, range(0, 8, 4)).view(-1, 8, 32)
    high = planes(blocks[:, 128:192].contiguous(), 32, 3, range(0, 8, 2))
    return low | (high << 4), blocks[:, 208:210], blocks[:, 192:208]


_BY_NAME: dict[str, Callable[[Tensor], Parts]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
