"""A linear layer, and how weights of 16 and 32 bits lie in memory.

Projection     what a layer calls: a weight whole, or spread over ranks
Linear         one layer on one rank, in whatever form its weight is kept
DenseLinear    one product by `[in, out]`, in whatever order that lies in memory: what a GPU and the meta device use
MemoryLayout   makes the `Linear` of a loaded dense weight: one object per model, chosen by device in `memory_layouts`

How a checkpoint stores a weight is `quantization.weight_layout`'s concern.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from millstream_runtime.models.linear.tables import Table


class Projection(Protocol):
    """A linear as a layer sees it: its weight whole, or spread over ranks."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += self(x)` in place."""


class Linear(Projection, Protocol):
    """`x @ weight + bias` on one rank: `[T, in]` to `[T, out]`."""

    @property
    def bias(self) -> Tensor | None:
        """`[out]`."""

    def without_bias(self) -> Linear:
        """The same layer over the same weight."""

    def reordered(self, order: list[int]) -> Linear:
        """The same with output `i` taken from output `order[i]`."""


class ExpertLinears(Protocol):
    """The linears of all experts of a layer, which have one shape."""

    @property
    def num_experts(self) -> int: ...

    def product(self, expert: int, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]` by the weight of one expert."""


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """`x @ weight + bias`."""

    weight: Tensor  # [in, out], of any strides
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`."""
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += self(x)` in place, as one product."""
        residual.addmm_(x, self.weight)
        if self.bias is not None:
            residual.add_(self.bias)

    def without_bias(self) -> Linear:
        return replace(self, bias=None)

    def reordered(self, order: list[int]) -> Linear:
        weight, bias = self._reordered_tensors(order)
        return DenseLinear(weight if self.weight.t().is_contiguous() else weight.contiguous(), bias)

    def _reordered_tensors(self, order: list[int]) -> tuple[Tensor, Tensor | None]:
        """Weight `[in, out]`, contiguous as `[out, in]`, and bias in the new order."""
        index = torch.tensor(order, device=self.weight.device)
        bias = None if self.bias is None else self.bias.index_select(0, index)
        return self.weight.t().index_select(0, index).t(), bias


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """The weights of all experts in one tensor."""

    weights: Tensor  # [experts, in, out]

    @property
    def num_experts(self) -> int:
        return self.weights.shape[0]

    def product(self, expert: int, x: Tensor) -> Tensor:
        return torch.mm(x, self.weights[expert])


class MemoryLayout(Protocol):
    """How a device wants the dense weights of linear layers in memory."""

    @property
    def copy_bytes(self) -> int:
        """Bytes of the copies of weights that `linear` has made so far."""

    @property
    def holds_sixteen_bits(self) -> bool:
        """Whether weights that are not quantized are held in 16 bits, narrower than what the model computes with: by
        `linear_of_parts`, not by `linear`."""

    def is_output_major(self, num_elements: int) -> bool:
        """Whether a weight of that size is to lie in memory as `[out, in]`, as in a checkpoint, not as `[in, out]`."""

    def reserve(self, num_bytes: int) -> bool:
        """Take this from the memory for copies, if it lasts: for a quantized weight that is kept dequantized."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The layer of a `weight` `[in, out]`, with the copies of it that this device computes with."""

    def linear_of_parts(self, parts: Sequence[Tensor], bias: Tensor | None, *, may_round: bool) -> Linear:
        """The layer of weights `[out, in]` of one 16-bit type side by side, where `holds_sixteen_bits`; counted in
        `copy_bytes`. The parts may be the mapped file. `may_round`: whether its results may be rounded to 16 bits."""

    def table_and_head(self, rows: Tensor) -> Table | None:
        """The same of an embedding's rows that are the output head too; None: on the meta device."""


class PlainLayout:
    """`[in, out]` and no copies."""

    copy_bytes = 0
    holds_sixteen_bits = False
    _is_output_major = False

    def is_output_major(self, num_elements: int) -> bool:
        return self._is_output_major

    def reserve(self, num_bytes: int) -> bool:
        return False

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return DenseLinear(weight, bias)

    def linear_of_parts(self, parts: Sequence[Tensor], bias: Tensor | None, *, may_round: bool) -> Linear:
        raise NotImplementedError

    def table_and_head(self, rows: Tensor) -> Table | None:
        raise NotImplementedError


class OutputMajorLayout(PlainLayout):
    """`[out, in]`, as in a checkpoint, and no copies.

    The inputs of an output follow one another, as do those of a row: that is what matrix units of a GPU read (BLAS's
    `TN`). Loading transposes nothing, and a tied output head is the embedding itself.
    """

    _is_output_major = True
