"""A linear layer on a CPU, where the layout of a weight decides what a product costs. No layout is best for all:

float32, room for a copy    oneDNN's blocks; one row on several threads by the checkpoint's    `two_layouts`
otherwise                   `[in, out]`: `x @ W` walks memory in order; in parts on several threads `split_product`
float16 holds the weight    copies of half the size in addition, for steps of few rows        `half_weights`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_runtime.models.cpu import two_layouts
from millstream_runtime.models.cpu.half_weights import MOST_PACKED_ELEMENTS, HalfWeight, half_copy, packed_bytes
from millstream_runtime.models.cpu.split_product import num_parts, split_product
from millstream_runtime.models.linear.linear import DenseLinear, PlainLayout


@dataclass(frozen=True, slots=True)
class CpuLinear(DenseLinear):
    """`x @ weight + bias` by the copy of the weight that is quickest for the number of rows."""

    half: HalfWeight | None = None  # from `half_weights.half_copy`
    packed: Tensor | None = None  # from `two_layouts.pack`

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`."""
        if self.half is not None and (product := self.half.product(x)) is not None:
            return product if self.bias is None else product.add_(self.bias)
        if self.packed is not None:
            return two_layouts.product(x, self.weight, self.packed, self.bias)
        if (parts := num_parts(x, self.weight)) > 1:
            product = split_product(x, self.weight, parts)
            return product if self.bias is None else product.add_(self.bias)
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += self(x)` in place, as one product where there is one that adds."""
        if self.half is not None or self.packed is not None:
            residual.add_(self(x))
            return
        if (parts := num_parts(x, self.weight)) > 1:
            residual.add_(split_product(x, self.weight, parts))
        else:
            residual.addmm_(x, self.weight)
        if self.bias is not None:
            residual.add_(self.bias)

    def reordered(self, order: list[int]) -> CpuLinear:
        """The same with output `i` taken from output `order[i]`."""
        weight, bias = self._reordered_tensors(order)
        packed = two_layouts.pack(weight) if self.packed is not None else None
        if packed is None:
            weight = weight.contiguous()
        return CpuLinear(weight, bias, None if self.half is None else half_copy(weight), packed)


class CpuLayout(PlainLayout):
    """Copies weights while `copy_budget_bytes` lasts; see `linear.MemoryLayout`."""

    def __init__(self, dtype: torch.dtype, copy_budget_bytes: int) -> None:
        self.copy_bytes = 0
        self._dtype = dtype
        self._budget_bytes = copy_budget_bytes  # left
        self._num_half_elements = 0  # packed in float16 so far
        self._can_pack = two_layouts.can_pack(dtype, torch.device("cpu"))

    def is_output_major(self, num_elements: int) -> bool:
        """Whether the weight gets a packed copy, which is made from `[out, in]`."""
        return self._can_pack and num_elements * self._dtype.itemsize <= self._budget_bytes

    def reserve(self, num_bytes: int) -> bool:
        if num_bytes > self._budget_bytes:
            return False
        self._count_copy(num_bytes)
        return True

    def linear(self, weight: Tensor, bias: Tensor | None) -> CpuLinear:
        """With a packed copy if `weight` lies output-major, and with a float16 copy, as far as there is memory."""
        packed = None
        if weight.t().is_contiguous() and self.is_output_major(weight.numel()):
            packed = two_layouts.pack(weight)
            self._count_copy(weight.numel() * weight.element_size())
        return CpuLinear(weight, bias, self._half_copy(weight), packed)

    def _half_copy(self, weight: Tensor) -> HalfWeight | None:
        num_elements, copy_bytes = weight.numel(), packed_bytes(weight.numel())
        if copy_bytes > self._budget_bytes or self._num_half_elements + num_elements > MOST_PACKED_ELEMENTS:
            return None
        half = half_copy(weight)
        if half is not None:
            self._num_half_elements += num_elements
            self._count_copy(copy_bytes)
        return half

    def _count_copy(self, copy_bytes: int) -> None:
        self.copy_bytes += copy_bytes
        self._budget_bytes -= copy_bytes
