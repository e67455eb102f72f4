"""A weight in blocks of GGUF as it is kept in memory, and the layer that dequantizes it in every product.

The blocks are those of the file, `[out, blocks of a row]`, so a layer takes the file's bytes. An output is computed
from its own row, whole: outputs can be dequantized a few at a time, and a result does not depend on how many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millstream_runtime.gguf.block_types import BlockType
from millstream_runtime.models.linear.added_product import AddedProduct
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.quantization.gguf_blocks import dequantized

MOST_ELEMENTS = 1 << 18  # dequantized at once: 1 MiB of float32, which stays in a core's cache


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """See the top of the file."""

    stored: Tensor  # uint8 [out, bytes of a row]
    kind: BlockType
    num_inputs: int

    @property
    def bits(self) -> int:
        """Of a code, rounded down; scales not counted."""
        return self.kind.block_bytes * 8 // self.kind.block_elements

    @property
    def num_outputs(self) -> int:
        return self.stored.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.stored.numel()

    def runs(self) -> list[tuple[int, int]]:
        """First and end of the outputs that are dequantized at once."""
        step = max(1, MOST_ELEMENTS // self.num_inputs)
        return [(first, min(first + step, self.num_outputs)) for first in range(0, self.num_outputs, step)]

    def rows(self, run: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Some outputs, `[out, in]`, computed in float32 and rounded once."""
        blocks = self.stored[run[0] : run[1]].view(-1, self.kind.block_bytes)
        return dequantized(blocks, self.kind).view(-1, self.num_inputs).to(dtype)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The whole weight `[in, out]`."""
        weight = torch.empty(self.num_inputs, self.num_outputs, dtype=dtype, device=self.stored.device)
        for run in self.runs():
            weight[:, run[0] : run[1]] = self.rows(run, dtype).t()
        return weight


@dataclass(frozen=True, slots=True)
class BlockLinear(AddedProduct):
    """See `Linear`. A product needs memory for one run of dequantized outputs."""

    weight: BlockWeight
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        inputs = x.to(wide)
        total = inputs.new_empty(x.shape[0], self.weight.num_outputs)
        for run in self.weight.runs():
            total[:, run[0] : run[1]] = torch.mm(inputs, self.weight.rows(run, wide).t())
        return (total if self.bias is None else total.add_(self.bias)).to(x.dtype)

    def without_bias(self) -> Linear:
        return replace(self, bias=None)

    def reordered(self, order: list[int]) -> Linear:
        index = torch.tensor(order, device=self.weight.stored.device)
        bias = None if self.bias is None else self.bias[index]
        return BlockLinear(replace(self.weight, stored=self.weight.stored.index_select(0, index)), bias)
