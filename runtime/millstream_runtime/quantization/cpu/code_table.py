"""A weight of 4 or 8 bits as a table of FBGEMM's embedding operators, which torch brings for x86.

An embedding bag is a sum of table rows with float32 factors. With the codes of input `k` as row `k`, the inputs of a
layer as factors, and a bag for each run of inputs of one group, it is a product by codes, computed from the packed
bytes in registers:

    y[t, n] = sum over runs r of  scale[group of r, n] * bag[t, r, n]
    bag[t, r, n] = sum over inputs k of r of  x[t, k] * (code[k, n] - center)
                   - (zero[group of r, n] - center) * sum over k of  x[t, k]

The zero points of a group are one more row of the table, whose factor is minus the sum of a run's inputs. Factors,
products and sums are float32 and codes are exact, so the result is that of the dequantized weight within the rounding
of float32. A bag with the codes of one input and, times minus one, the zero points of its group dequantizes.

    4 bits   row: two codes per byte, neighbours, the first in the low half; scale and bias of the row in float16
    8 bits   row: one code per byte; scale and bias of the row in float32

The row's own scale is 1 and its bias minus the center.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import Tensor

from millstream_runtime.quantization.grouped_weight import GroupedWeight, unpack_halves

TAIL_DTYPES = {4: torch.float16, 8: torch.float32}  # of scale and bias at the end of a table row
MOST_BAG_ROWS = {4: 2, 8: 4}  # rows of `x`; for more it is quicker to dequantize
MOST_DENSE_ELEMENTS = 1 << 19  # dequantized at once
OPERATORS = {4: "embedding_bag_4bit_rowwise_offsets", 8: "embedding_bag_byte_rowwise_offsets"}

Runs = tuple[tuple[int, int, int], ...]  # see `GroupedWeight.runs`


@dataclass(frozen=True, slots=True)
class DenseRuns:
    """Bags that dequantize some runs: `indices` and `offsets` int64, `factors` float32 or all 1."""

    first_run: int
    end_run: int
    indices: Tensor
    offsets: Tensor  # [inputs + 1]
    factors: Tensor | None


@dataclass(frozen=True, slots=True)
class Bags:
    """Which table rows are summed. Equal for all layers of one shape, which share the tensors."""

    indices: Tensor  # int64 [most rows of `x` * factors of one]
    offsets: Tensor  # int64 [most rows of `x` * runs + 1]
    dense: tuple[DenseRuns, ...]


@dataclass(frozen=True, slots=True)
class CodeTable:
    """See the top of the file. `runs`, `order` and `columns`: see `GroupedWeight`."""

    table: Tensor  # uint8 [in, and groups where there are zero points; bytes of a row]
    scales: Tensor  # floats [groups, columns]
    bags: Bags
    runs: Runs
    num_outputs: int
    bits: int
    center: int
    has_zeros: bool
    order: Tensor | None
    columns: Tensor | None

    @property
    def num_bytes(self) -> int:
        tensors = (self.table, self.scales, self.order, self.columns)
        return sum(one.numel() * one.element_size() for one in tensors if one is not None)

    def product(self, x: Tensor) -> Tensor:
        """Float32 `[T, in]` by the weight, float32 `[T, out]`."""
        if not x.shape[0]:
            return x.new_empty(0, self.num_outputs)
        rows = x if self.order is None else x.index_select(1, self.order)
        return self._by_bags(rows) if x.shape[0] <= MOST_BAG_ROWS[self.bits] else self._dequantizing(rows)

    def with_outputs(self, order: list[int]) -> CodeTable:
        """The same with output `i` taken from output `order[i]`."""
        index = torch.tensor(order)
        codes = self.table[:, : -2 * TAIL_DTYPES[self.bits].itemsize]
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), 2).flatten(1)
        return replace(
            self,
            table=_table(codes.index_select(1, index), self.bits, self.center),
            scales=self.scales if self.columns is not None else self.scales.index_select(1, index),
            columns=None if self.columns is None else self.columns.index_select(0, index),
        )

    def _by_bags(self, rows: Tensor) -> Tensor:
        num_rows, num_runs = rows.shape[0], len(self.runs)
        factors = (self._with_sums(rows) if self.has_zeros else rows).reshape(-1)
        sums = self._summed(self.bags.indices[: len(factors)], self.bags.offsets[: num_rows * num_runs + 1], factors)
        scaled = sums.view(num_rows, num_runs, -1).mul_(self._scales(0, num_runs))
        return scaled[:, 0] if num_runs == 1 else scaled.sum(1)

    def _dequantizing(self, rows: Tensor) -> Tensor:
        total = rows.new_zeros(rows.shape[0], self.num_outputs)
        for part in self.bags.dense:
            start, stop = self.runs[part.first_run][0], self.runs[part.end_run - 1][1]
            total.addmm_(rows[:, start:stop], self._dense(part))
        return total

    def _dense(self, part: DenseRuns) -> Tensor:
        """Float32 `[inputs of the runs, out]`."""
        found = self._summed(part.indices, part.offsets, part.factors)
        runs, scales = self.runs[part.first_run : part.end_run], self._scales(part.first_run, part.end_run)
        length = _common_length(runs)
        if length is not None:
            return found.view(len(runs), length, -1).mul_(scales.unsqueeze(1)).flatten(0, 1)
        lengths = torch.tensor([stop - start for start, stop, _ in runs])
        return found.mul_(scales.expand(len(runs), -1).repeat_interleave(lengths, 0))

    def _with_sums(self, rows: Tensor) -> Tensor:
        """`[T, in]` with, after each run, minus its sum: the factor of the zero points."""
        length = _common_length(self.runs)
        if length is not None:
            by_run = rows.view(rows.shape[0], len(self.runs), length)
            return torch.cat((by_run, by_run.sum(2, keepdim=True).neg_()), 2)
        parts = [rows[:, start:stop] for start, stop, _ in self.runs]
        return torch.cat([one for part in parts for one in (part, -part.sum(1, keepdim=True))], 1)

    def _scales(self, first_run: int, end_run: int) -> Tensor:
        """`[runs, out]`, or `[1, out]` where all are of one group."""
        first, last = self.runs[first_run][2], self.runs[end_run - 1][2]
        if first == last or last - first == end_run - first_run - 1:  # groups are sorted
            scales = self.scales[first : last + 1]
        else:
            groups = [group for _, _, group in self.runs[first_run:end_run]]
            scales = self.scales.index_select(0, torch.tensor(groups))
        return scales if self.columns is None else scales.index_select(1, self.columns)

    def _summed(self, indices: Tensor, offsets: Tensor, factors: Tensor | None) -> Tensor:
        """Float32 `[bags, out]`."""
        operator = getattr(torch.ops.quantized, OPERATORS[self.bits])
        found: Tensor = operator(self.table, indices, offsets, False, 0, False, factors, None, True)
        return found[:, : self.num_outputs]


@cache
def _is_available() -> bool:
    """Whether this machine and this torch compute embedding bags in vectors of 8 floats or more."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX") and all(
        hasattr(torch.ops.quantized, name) for name in OPERATORS.values()
    )


def fits(weight: GroupedWeight) -> bool:
    """Whether codes are integers, which a table holds, and this machine computes with tables."""
    return weight.values is None and not weight.codes.dtype.is_floating_point and _is_available()


def code_table(weight: GroupedWeight) -> CodeTable:
    """Return the table of a weight whose codes are integers."""
    zeros = weight.zeros if isinstance(weight.zeros, Tensor) else None
    codes, center = _from_zero(weight.codes, weight), 1 << (weight.bits - 1)
    if zeros is not None:
        codes = torch.cat((codes, _from_zero(zeros, weight)))
    elif isinstance(weight.zeros, int) and weight.codes.dtype != torch.int8:
        center = weight.zeros
    return CodeTable(
        table=_table(codes, weight.bits, center),
        scales=weight.scales,
        bags=_bags(weight.runs, weight.num_outputs, MOST_BAG_ROWS[weight.bits], zeros is not None),
        runs=weight.runs,
        num_outputs=weight.num_outputs,
        bits=weight.bits,
        center=center,
        has_zeros=zeros is not None,
        order=weight.order,
        columns=weight.columns,
    )


def _from_zero(packed: Tensor, weight: GroupedWeight) -> Tensor:
    """Codes as uint8 `[rows, out]`; signed ones plus 128."""
    if weight.bits == 4:
        return unpack_halves(packed, weight.num_outputs)
    return packed.view(torch.uint8) ^ 128 if packed.dtype == torch.int8 else packed


def _table(codes: Tensor, bits: int, center: int) -> Tensor:
    if bits == 4:
        codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    tail = torch.tensor([1, -center], dtype=TAIL_DTYPES[bits]).view(torch.uint8)
    return torch.cat((codes, tail.expand(codes.shape[0], -1)), 1)


def _common_length(runs: Runs) -> int | None:
    """Inputs of each run, where that is one number."""
    length = runs[0][1] - runs[0][0]
    return length if all(stop - start == length for start, stop, _ in runs) else None


@lru_cache(maxsize=64)
def _bags(runs: Runs, num_outputs: int, most_rows: int, has_zeros: bool) -> Bags:
    num_inputs = runs[-1][1]
    rows, lengths = [], []
    for start, stop, group in runs:
        of_run = [*range(start, stop), *([num_inputs + group] if has_zeros else [])]
        rows += of_run
        lengths.append(len(of_run))
    indices = torch.tensor(rows).repeat(most_rows)
    offsets = torch.tensor([0, *lengths * most_rows]).cumsum(0)
    dense, first, most_inputs = [], 0, max(1, MOST_DENSE_ELEMENTS // num_outputs)
    for end in range(1, len(runs) + 1):
        if end == len(runs) or runs[end][1] - runs[first][0] > most_inputs:
            dense.append(_dense_runs(runs, first, end, has_zeros))
            first = end
    return Bags(indices, offsets, tuple(dense))


def _dense_runs(runs: Runs, first: int, end: int, has_zeros: bool) -> DenseRuns:
    num_inputs, start, stop = runs[-1][1], runs[first][0], runs[end - 1][1]
    inputs = torch.arange(start, stop)
    if not has_zeros:
        return DenseRuns(first, end, inputs, torch.arange(stop - start + 1), None)
    groups = torch.tensor([group for one, after, group in runs[first:end] for _ in range(one, after)])
    indices = torch.stack((inputs, num_inputs + groups), 1).flatten()
    factors = torch.tensor([1.0, -1.0]).repeat(stop - start)
    return DenseRuns(first, end, indices, torch.arange(stop - start + 1) * 2, factors)
