"""A quantized weight in memory: codes, and a scale and a zero point for each group of inputs.

    weight[k, n] = (code[k, n] - zero[group of k, n]) * scale[group of k, n]      or values[code[k, n]] * scale[…]

All formats come to this form when they are loaded. Inputs are sorted by group then, so that the rows of a group are one
run of memory whatever order the file has (GPTQ's act-order), and a run may be shorter than a group (a rank's share).

    4 bit   two codes per byte, the first half of the outputs in the low half-bytes   uint8 [in, ceil(out / 2)]
    8 bit   one byte per code                                            uint8, int8 or float8_e4m3fn [in, out]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

MOST_ROWS = 128  # of a run: what is dequantized at once stays in a core's cache


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """See the top of the file. `runs`: first row, end and group; together they cover all rows in order."""

    codes: Tensor
    scales: Tensor  # floats [groups, columns]
    zeros: Tensor | int  # as `codes`, for each group; or one for all
    runs: tuple[tuple[int, int, int], ...]
    num_outputs: int
    bits: int  # 4 or 8
    order: Tensor | None = None  # int32 [in]: row `k` multiplies input `order[k]`
    columns: Tensor | None = None  # int32 [out]: which column of `scales` an output has; None: its own
    quantizes_activations: bool = False  # the format asks for products of 8-bit activations
    values: Tensor | None = None  # float32 [16]: what codes of 4 bits stand for, without zeros; None: themselves

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[0]

    @property
    def num_bytes(self) -> int:
        tensors = (self.codes, self.scales, self.zeros, self.order, self.columns)
        return sum(one.numel() * one.element_size() for one in tensors if isinstance(one, Tensor))

    def rows(self, run: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """Dequantize one run: `[its rows, out]`, computed in at least float32 and rounded once."""
        start, stop, group = run
        return self._dequantized(start, stop, slice(group, group + 1), dtype)

    def block(self, start: int, stop: int, groups: Tensor, dtype: torch.dtype) -> Tensor:
        """The same of the rows `start` to `stop`, whatever their groups: `groups` `[stop - start]`."""
        return self._dequantized(start, stop, groups if len(self.scales) > 1 else slice(0, 1), dtype)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The whole weight `[in, out]`, inputs in the model's order."""
        weight = torch.empty(self.num_inputs, self.num_outputs, dtype=dtype, device=self.codes.device)
        for run in self.runs:
            rows = self.rows(run, dtype)
            if self.order is None:
                weight[run[0] : run[1]] = rows
            else:
                weight.index_copy_(0, self.order[run[0] : run[1]].long(), rows)
        return weight

    def with_outputs(self, order: list[int]) -> GroupedWeight:
        """The same with output `i` taken from output `order[i]`."""
        index = torch.tensor(order, device=self.codes.device)

        def taken(packed: Tensor) -> Tensor:
            if self.bits == 8:
                return packed.view(torch.uint8).index_select(1, index).view(packed.dtype)
            return pack_halves(unpack_halves(packed, self.num_outputs).index_select(1, index))

        return replace(
            self,
            codes=taken(self.codes),
            scales=self.scales if self.columns is not None else self.scales.index_select(1, index),
            zeros=taken(self.zeros) if isinstance(self.zeros, Tensor) else self.zeros,
            columns=None if self.columns is None else self.columns.index_select(0, index),
        )

    def _dequantized(self, start: int, stop: int, groups: Tensor | slice, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        found = self._values(start, stop, wide)
        if isinstance(self.zeros, Tensor):
            found.sub_(self._unpacked(self.zeros[groups], wide))
        elif self.zeros:
            found.sub_(self.zeros)
        scales = self.scales[groups]
        if self.columns is not None:
            scales = scales.index_select(1, self.columns)
        return found.mul_(scales.to(wide)).to(dtype)

    def _values(self, start: int, stop: int, wide: torch.dtype) -> Tensor:
        if self.values is None:
            return self._unpacked(self.codes[start:stop], wide)
        codes = unpack_halves(self.codes[start:stop], self.num_outputs)
        return self.values.to(wide).index_select(0, codes.flatten().int()).view(codes.shape)

    def _unpacked(self, packed: Tensor, wide: torch.dtype) -> Tensor:
        if self.bits == 8:
            return packed.to(wide)
        return unpack_halves(packed, self.num_outputs).to(wide)  # one conversion of a run of bytes, which is vectorised


def group_size(weight: GroupedWeight) -> int | None:
    """Inputs of each group but the last, which may be shorter; None: they differ, or inputs do not begin with it."""
    sizes, groups = [], []
    for group, runs in groupby(weight.runs, lambda run: run[2]):
        groups.append(group)
        sizes.append(sum(stop - start for start, stop, _ in runs))
    alike = all(one == sizes[0] for one in sizes[:-1]) and sizes[-1] <= sizes[0]
    return sizes[0] if alike and groups == list(range(len(weight.scales))) else None


def pack_halves(codes: Tensor) -> Tensor:
    """Codes of 4 bits, uint8 `[rows, out]`, two per byte: `[rows, ceil(out / 2)]`."""
    half = -(-codes.shape[1] // 2)
    packed = codes[:, :half].clone()
    packed[:, : codes.shape[1] - half] |= codes[:, half:] << 4
    return packed


def unpack_halves(packed: Tensor, num_outputs: int) -> Tensor:
    """The inverse of `pack_halves`."""
    return torch.cat((packed & 15, packed >> 4), dim=1)[:, :num_outputs]


def runs_of(groups: Tensor) -> tuple[tuple[int, int, int], ...]:
    """Runs of equal values in sorted `groups` `[in]`, none longer than MOST_ROWS."""
    values, counts = torch.unique_consecutive(groups, return_counts=True)
    runs, start = [], 0
    for group, count in zip(values.tolist(), counts.tolist(), strict=True):
        for first in range(start, start + count, MOST_ROWS):
            runs.append((first, min(first + MOST_ROWS, start + count), group))
        start += count
    return tuple(runs)
