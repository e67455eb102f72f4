"""The typed function of `bfloat16_row`, and whether it gives the bits of oneDNN on this machine.

oneDNN does not document the order of its sums, or its blocks, so both are compared: once per process with sums that
cancel, where another order shows, and with each weight that is to be read so.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_kernels.cpu.bfloat16.check import cancelling_numbers
from millstream_kernels.cpu.bfloat16.product import OneDNN, Operations
from millstream_kernels.cpu.loaded_code import LoadedCode
from millstream_kernels.cpu.task import BLOCK_INPUTS, BLOCK_OUTPUTS, RowField

SUM_BLOCKS = (32, 16, 64, 8, 128)  # of inputs, behind which oneDNN may start a new sum; the usual first
ROWS_COMPARED, OUTPUTS_COMPARED = 4, 128
# Multiplications that another thread is worth waking for.
MULTIPLICATIONS_OF_TEAM = 1 << 17

_Task = ctypes.c_int64 * len(RowField)


@dataclass(frozen=True, slots=True)
class RowWeight:
    """A weight whose product of one row has the bits of oneDNN's.

    Attributes:
        packed: as oneDNN has packed it.
        address: of `packed`.
        sum_blocks: of inputs, behind which a new sum starts.
    """

    code: LoadedCode
    packed: Tensor
    address: int
    num_inputs: int
    num_outputs: int
    sum_blocks: int

    def product(self, x: Tensor) -> Tensor:
        """`x` bfloat16 `[1, in]`, contiguous, to float32 `[1, out]`, rounded to bfloat16 numbers."""
        out = torch.empty(1, self.num_outputs)
        inputs, outputs = self.num_inputs // BLOCK_INPUTS, self.num_outputs // BLOCK_OUTPUTS
        task = _Task(x.data_ptr(), self.address, out.data_ptr(), inputs, outputs, self.sum_blocks)
        worth = self.num_inputs * self.num_outputs // MULTIPLICATIONS_OF_TEAM
        self.code.run("bfloat16_row", ctypes.addressof(task), max(1, min(torch.get_num_threads(), outputs, worth)))
        return out

    def has_bits_of(self, operations: Operations, x: Tensor) -> bool:
        """Whether each row of `x` bfloat16 `[rows, in]` has the bits alone that `operations` give it among others."""
        expected = operations.product(x, self.packed).float()
        return all(torch.equal(self.product(x[row : row + 1]), expected[row : row + 1]) for row in range(len(x)))


@torch.inference_mode()
def row_weight(
    code: LoadedCode, operations: Operations, packed: Tensor, num_outputs: int, num_inputs: int
) -> RowWeight | None:
    """Return what multiplies one row by a packed weight; None where oneDNN's own product is to do it.

    Its blocks must be whole, and it must agree with oneDNN about rows of random numbers.
    """
    if not isinstance(operations, OneDNN) or num_inputs % BLOCK_INPUTS or num_outputs % BLOCK_OUTPUTS:
        return None
    try:
        sum_blocks = sum_blocks_of(code, operations, num_inputs)
        if sum_blocks is None or torch.ops.mkldnn._nbytes(packed) != 2 * num_inputs * num_outputs:
            return None
        weight = _weight(code, packed, num_outputs, num_inputs, sum_blocks)
        random = torch.Generator().manual_seed(num_inputs)
        x = torch.randn(ROWS_COMPARED, num_inputs, generator=random).bfloat16()
        return weight if weight.has_bits_of(operations, x) else None
    except (AttributeError, RuntimeError):  # these functions of torch are private: oneDNN's own product does as well
        return None


@functools.cache
@torch.inference_mode()
def sum_blocks_of(code: LoadedCode, operations: Operations, num_inputs: int) -> int | None:
    """Return behind how many blocks of inputs oneDNN starts a new sum, found by sums that cancel: of what is left each
    order of additions has another number. None where no order of ours is its, and where the CPU lacks the instruction.
    """
    if not torch.cpu._is_avx512_bf16_supported():
        return None
    x, weight = cancelling_numbers(num_inputs, OUTPUTS_COMPARED)
    packed, few = operations.pack(weight), x[: 2 * ROWS_COMPARED]
    for sum_blocks in SUM_BLOCKS:
        if _weight(code, packed, OUTPUTS_COMPARED, num_inputs, sum_blocks).has_bits_of(operations, few):
            return sum_blocks
    return None


def _weight(code: LoadedCode, packed: Tensor, num_outputs: int, num_inputs: int, sum_blocks: int) -> RowWeight:
    address = torch.ops.mkldnn.data_ptr(packed)
    return RowWeight(code, packed, address, num_inputs, num_outputs, sum_blocks)
