"""A weight of 4 bits as `w4a16` reads it. All formats (AWQ, GPTQ, compressed-tensors) are repacked to it once, at load.

    weight[n, k] = (code[n, k] - zero[n, k's group]) * scale[n, k's group]

Memory is cut into tiles of 128 outputs by 128 inputs, 8 KiB that follow one another; the tiles of one run of outputs
follow one another too, in the order of the inputs. Per output a tile has 16 words of 32 bits, four loads of 16 bytes:

    inputs of a tile    | 0 .. 31 | 32 .. 63 | 64 .. 95 | 96 .. 127 |          four runs of 32

    bits of word i      31  28 27  24 23  20 19  16 15  12 11   8 7    4 3    0
    hold input          2i+96  2i+64  2i+32  2i     2i+97  2i+65  2i+33  2i+1

So one shift and one mask give the codes of two neighbours in the two halves of a word, where a matrix instruction takes
them as one register. A group has 32, 64 or a multiple of 128 inputs: it never ends within a run.

Scale and zero point of a group lie in one word: the scale's 16 bits below, the zero point above. Those of a run of 128
outputs follow one another. What is missing to whole tiles is filled with codes of 0.

Bytes:  N * K / 2 + 4 * N * K / group size, N and K rounded up to multiples of 128.

Frantar et al. 2024 (Marlin, arXiv 2408.11743) for repacking once what a matrix instruction takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millstream_kernels.arguments import require, require_tensor

TILE = 128  # outputs and inputs
RUNS = 4  # of inputs in a tile
RUN = TILE // RUNS
WORDS = RUN // 2  # per output and tile
SCALES = {torch.float16, torch.bfloat16}
LARGEST_CODE = 15
UNIT = 8  # the number of inputs is a multiple of it: 16 bytes of 16 bits


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """See the top of the file; made by `repack`."""

    codes: Tensor  # int32 [tiles of outputs, tiles of inputs, 128, 16]
    groups: Tensor  # int32 [tiles of outputs, groups, 128]: scales and zero points
    num_outputs: int
    num_inputs: int
    group_size: int  # 32, 64 or a multiple of 128
    scale_dtype: torch.dtype  # float16 or bfloat16
    order: Tensor | None  # int64 [in]: input k of the weight is input order[k] of the layer (act-order)

    @property
    def num_bytes(self) -> int:
        tensors = (self.codes, self.groups, self.order)
        return sum(one.numel() * one.element_size() for one in tensors if one is not None)

    def with_outputs(self, index: Tensor) -> Int4Weight:
        """The same with output `i` taken from output `index[i]`, int64."""
        missing = _up_to_tiles(len(index)) - len(index)
        # What fills up the last tile is output 0 once more; nobody reads its product.
        whole = torch.cat((index, index.new_zeros(missing)))
        codes = self.codes.transpose(1, 2).flatten(0, 1)[whole]
        groups = self.groups.transpose(1, 2).flatten(0, 1)[whole]
        return replace(
            self,
            codes=codes.view(-1, TILE, *codes.shape[1:]).transpose(1, 2).contiguous(),
            groups=groups.view(-1, TILE, groups.shape[1]).transpose(1, 2).contiguous(),
            num_outputs=len(index),
        )


def repack(
    codes: Tensor, scales: Tensor, zeros: Tensor | int, group_size: int | None, order: Tensor | None = None
) -> Int4Weight:
    """Return the weight as the kernel reads it; pure torch, on the tensors' device.

    Args:
        codes: `[K, N]` uint8, 0 to 15, inputs sorted by group.
        scales: `[groups, N]` in float16 or bfloat16.
        zeros: `[groups, N]` uint8, 0 to 15, or one for all (8: symmetric).
        group_size: 32, 64 or a multiple of 128; None: one group per output. The last group may be shorter.
        order: `[K]` int32 or int64, the layer's input that each row of `codes` belongs to (GPTQ's act-order).

    Raises:
        KernelArgumentError: naming the argument.
    """
    require_tensor("codes", codes, (None, None), {torch.uint8})
    num_inputs, num_outputs = codes.shape
    require(num_inputs > 0 and num_outputs > 0, "codes", f"has the shape {list(codes.shape)}")
    require(int(codes.max()) <= LARGEST_CODE, "codes", f"holds {int(codes.max())}; codes are 0 to 15")
    size = group_size or _up_to_tiles(num_inputs)
    require(is_group_size(size), "group_size", f"is {size}; 32, 64 or a multiple of 128 is expected")
    num_groups = -(-num_inputs // size)
    require_tensor("scales", scales, (num_groups, num_outputs), SCALES)
    if isinstance(zeros, Tensor):
        require_tensor("zeros", zeros, (num_groups, num_outputs), {torch.uint8})
    highest = int(zeros.max()) if isinstance(zeros, Tensor) else zeros
    require(0 <= highest <= LARGEST_CODE, "zeros", f"holds {highest}; zero points are 0 to 15")
    if order is not None:
        require_tensor("order", order, (num_inputs,), {torch.int32, torch.int64})
        is_permutation = torch.equal(order.long().sort().values, torch.arange(num_inputs, device=order.device))
        require(is_permutation, "order", "is no permutation of the inputs")
    return Int4Weight(
        codes=_words_of(codes),
        groups=_groups_of(scales, zeros, max(num_groups, _up_to_tiles(num_inputs) // size)),
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        group_size=size,
        scale_dtype=scales.dtype,
        order=None if order is None else order.long(),
    )


def is_group_size(size: int) -> bool:
    """Whether groups of so many inputs never end within a run."""
    return size > 0 and (size % TILE == 0 or (size % RUN == 0 and TILE % size == 0))


def _words_of(codes: Tensor) -> Tensor:
    """`Int4Weight.codes`."""
    num_inputs, num_outputs = codes.shape
    padding = (0, _up_to_tiles(num_outputs) - num_outputs, 0, _up_to_tiles(num_inputs) - num_inputs)
    whole = torch.nn.functional.pad(codes, padding)
    in_tiles = whole.view(whole.shape[0] // TILE, RUNS, WORDS, 2, whole.shape[1] // TILE, TILE)
    words = torch.zeros(whole.shape[1] // TILE, whole.shape[0] // TILE, TILE, WORDS, dtype=torch.int32)
    words = words.to(codes.device)
    for run in range(RUNS):
        for place in range(2):
            nibbles = in_tiles[:, run, :, place].permute(2, 0, 3, 1).to(torch.int32)
            words |= nibbles << (4 * run + 16 * (1 - place))
    return words


def _groups_of(scales: Tensor, zeros: Tensor | int, num_groups: int) -> Tensor:
    """`Int4Weight.groups`."""
    missing = (0, _up_to_tiles(scales.shape[1]) - scales.shape[1], 0, num_groups - scales.shape[0])
    points = zeros if isinstance(zeros, Tensor) else torch.full_like(scales, zeros, dtype=torch.uint8)
    low = torch.nn.functional.pad(scales, missing).contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    high = torch.nn.functional.pad(points, missing).to(torch.int32) << 16
    return (low | high).view(num_groups, -1, TILE).transpose(0, 1).contiguous()


def _up_to_tiles(size: int) -> int:
    return -(-size // TILE) * TILE
