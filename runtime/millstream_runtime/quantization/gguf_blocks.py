"""Blocks of GGUF files to float32, by the arithmetic of ggml's reference (ggml/src/ggml-quants.c), bit for bit.

    Q8_0           scale * code                                         32 weights
    Q4_0, Q5_0     scale * (code - 8 or 16)                             32
    Q4_1, Q5_1     scale * code + least                                 32
    IQ4_NL         scale * table[code]                                  32
    Q2_K           scale * s * code - least * m         16 groups of 16, s and m in 4 bits
    Q3_K, Q6_K     scale * s * (code - 4 or 32)         16 groups of 16, s in 6 and 8 bits
    Q4_K, Q5_K     scale * s * code - least * m          8 groups of 32, s and m in 6 bits

`blocks` are always uint8 `[n, block_bytes]`, results float32 `[n, block_elements]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millstream_runtime.gguf.block_types import BlockType

# fmt: off
IQ4_NL_VALUES = (
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
)
# fmt: on


def dequantized(blocks: Tensor, kind: BlockType) -> Tensor:
    """The weights of blocks of one type; see the top of the file."""
    return _BY_NAME[kind.name](blocks)


def scales_are_finite(blocks: Tensor, kind: BlockType) -> bool:
    """Whether no float16 of a block is NaN or infinite; nothing else of it can be."""
    return all(bool((_byte(blocks, at + 1) & 0x7C != 0x7C).all()) for at in kind.halves)


def _byte(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at]


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte, as float32 `[n, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def halves_of_bytes(codes: Tensor) -> Tensor:
    """`[n, bytes]`: the low halves of all bytes, then the high ones."""
    return torch.cat((codes & 15, codes >> 4), dim=1)


def fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Bit `i` of four bytes is that of code `i`: 0 or 16, uint8 `[n, 32]`."""
    return (_bits(blocks[:, at : at + 4], 1, range(8)) << 4).flatten(1)


def _bits(packed: Tensor, mask: int, shifts: range) -> Tensor:
    """`[n, bytes]` to `[n, bytes, len(shifts)]`: several small codes of each byte."""
    places = torch.tensor([*shifts], dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> places) & mask


def planes(packed: Tensor, width: int, mask: int, shifts: range) -> Tensor:
    """Runs of `width` bytes, of each the first codes of all bytes, then the second: `[n, runs * shifts, width]`."""
    runs = packed.view(len(packed), -1, 1, width)
    places = torch.tensor([*shifts], dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    return ((runs >> places) & mask).view(len(packed), -1, width)


def _q4_0(blocks: Tensor) -> Tensor:
    return (halves_of_bytes(blocks[:, 2:]).float() - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * halves_of_bytes(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = halves_of_bytes(blocks[:, 6:]) | fifth_bits(blocks, 2)
    return (codes.float() - 16) * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = halves_of_bytes(blocks[:, 8:]) | fifth_bits(blocks, 4)
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _iq4_nl(blocks: Tensor) -> Tensor:
    codes = halves_of_bytes(blocks[:, 2:])
    table = torch.tensor(IQ4_NL_VALUES, device=blocks.device)
    return _half(blocks, 0) * table.index_select(0, codes.flatten().int()).view(codes.shape)


def _q2_k(blocks: Tensor) -> Tensor:
    small = blocks[:, :16]
    scale = (_half(blocks, 80) * (small & 15).float()).unsqueeze(-1)
    least = (_half(blocks, 82) * (small >> 4).float()).unsqueeze(-1)
    codes = planes(blocks[:, 16:80].contiguous(), 32, 3, range(0, 8, 2)).view(-1, 16, 16).float()
    return (scale * codes - least).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    low = planes(blocks[:, 96:104].contiguous(), 8, 15, range(0, 8, 4)).flatten(1)
    high = planes(blocks[:, 104:108].contiguous(), 4, 3, range(0, 8, 2)).flatten(1)
    scale = _half(blocks, 108) * ((low | (high << 4)).float() - 32)
    codes = planes(blocks[:, 32:96].contiguous(), 32, 3, range(0, 8, 2)).view(-1, 16, 16)
    is_low = planes(blocks[:, :32].contiguous(), 32, 1, range(8)).view(-1, 16, 16) ^ 1
    return (scale.unsqueeze(-1) * (codes.float() - (is_low << 2).float())).flatten(1)


def six_bit_scales(small: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and least weights of eight groups in 12 bytes, uint8 `[n, 8]` each."""
    first, second, third = small[:, 0:4], small[:, 4:8], small[:, 8:12]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    least = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    return scales, least


def _q4_k(blocks: Tensor) -> Tensor:
    scales, least = six_bit_scales(blocks[:, 4:16])
    codes = planes(blocks[:, 16:].contiguous(), 32, 15, range(0, 8, 4)).float()
    scaled = (_half(blocks, 0) * scales.float()).unsqueeze(-1) * codes
    return (scaled - (_half(blocks, 2) * least.float()).unsqueeze(-1)).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, least = six_bit_scales(blocks[:, 4:16])
    low = planes(blocks[:, 48:].contiguous(), 32, 15, range(0, 8, 4))
    high = planes(blocks[:, 16:48].contiguous(), 32, 1, range(8))
    scaled = (_half(blocks, 0) * scales.float()).unsqueeze(-1) * (low | (high << 4)).float()
    return (scaled - (_half(blocks, 2) * least.float()).unsqueeze(-1)).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    low = planes(blocks[:, :128].contiguous(), 64, 15, range(0, 8, 4)).view(-1, 8, 32)
    high = planes(blocks[:, 128:192].contiguous(), 32, 3, range(0, 8, 2))
    codes = (low | (high << 4)).view(-1, 16, 16).float() - 32
    return (scale.unsqueeze(-1) * codes).flatten(1)


_BY_NAME = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
}
