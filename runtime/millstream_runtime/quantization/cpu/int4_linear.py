"""Products of bfloat16 activations by 4-bit weights on a CPU, by torch's own kernel (`_weight_int4pack_mm_for_cpu`).

    y[t, n] = sum over k of  bfloat16(x[t, k]) * ((code[k, n] - 8) * scale[g, n] + (8 - zero[g, n]) * scale[g, n])

Products and sums are float32; a scale and the second term of each group are bfloat16, and so is the result. A row is
computed in the same way, bit for bit, whatever the number of rows. The kernel takes groups of 32 to 256 inputs that
divide the inputs, and outputs in sixteens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from millstream_runtime.models.linear.added_product import AddedProduct
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.models.linear.several import SideBySideLinear
from millstream_runtime.quantization.grouped_weight import GroupedWeight, unpack_halves

GROUP_SIZES, OUTPUTS_AT_ONCE = (256, 128, 64, 32), 16
OUTPUTS_PACKED_AT_ONCE = 1024  # whole blocks of the packed layout, which are of 64 outputs at most
ZERO_CODE = 8  # what the kernel subtracts of each code
OPERATORS = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")


@dataclass(frozen=True, slots=True)
class Int4Linear(AddedProduct):
    """See `Linear`. Inputs and results are float32."""

    packed: Tensor  # uint8 [out, in / 2], opaque
    groups: Tensor  # bfloat16 [groups, out, 2]: scales and second terms
    group_size: int
    order: Tensor | None  # see `GroupedWeight`
    bias: Tensor | None  # [out]

    @property
    def num_bytes(self) -> int:
        tensors = (self.packed, self.groups, self.order)
        return sum(one.numel() * one.element_size() for one in tensors if one is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """Float32 `[T, in]` to `[T, out]`."""
        if not x.shape[0]:
            return x.new_empty(0, self.packed.shape[0])
        rows = x.bfloat16() if self.order is None else x.bfloat16().index_select(1, self.order)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, self.group_size, self.groups).float()
        found: Tensor = product if self.bias is None else product.add_(self.bias)
        return found

    def without_bias(self) -> Linear:
        return replace(self, bias=None)

    def reordered(self, order: list[int]) -> Linear:
        return SideBySideLinear((self,), torch.tensor(order))


def fits(weight: GroupedWeight) -> bool:
    """Whether codes are integers of 4 bits in a shape that the kernel takes, and this machine has the kernel."""
    return (
        weight.bits == 4
        and weight.values is None
        and weight.columns is None
        and weight.num_outputs % OUTPUTS_AT_ONCE == 0
        and _is_available()
        and _group_size(weight) > 0
    )


def int4_linear(weight: GroupedWeight, bias: Tensor | None) -> Int4Linear:
    """Return the layer of a weight that `fits`."""
    size = _group_size(weight)
    codes = unpack_halves(weight.codes, weight.num_outputs).t()
    found = _groups_of_inputs(weight)[::size]
    scales = weight.scales.float()
    zeros = weight.zeros
    if isinstance(zeros, Tensor):
        zeros = unpack_halves(zeros, weight.num_outputs).float()
    terms = torch.stack((scales, (ZERO_CODE - zeros) * scales), 2)
    return Int4Linear(
        packed=torch.cat([_packed(some) for some in torch.split(codes, OUTPUTS_PACKED_AT_ONCE)]),
        groups=terms.index_select(0, found).to(torch.bfloat16),
        group_size=size,
        order=weight.order,
        bias=bias,
    )


@cache
def _is_available() -> bool:
    """Whether torch has vector code for it on this machine."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX") and all(
        hasattr(torch.ops.aten, name) for name in OPERATORS
    )


def _packed(codes: Tensor) -> Tensor:
    """Codes `[out, in]`, which the operator wants as int32, as uint8 `[out, in / 2]`."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32).contiguous(), 1)
    return packed


def _group_size(weight: GroupedWeight) -> int:
    """The largest size of blocks, each of one group, that divide the inputs; 0: there is none."""
    groups = _groups_of_inputs(weight)
    for size in GROUP_SIZES:
        if not weight.num_inputs % size:
            blocks = groups.view(-1, size)
            if bool((blocks == blocks[:, :1]).all()):
                return size
    return 0


def _groups_of_inputs(weight: GroupedWeight) -> Tensor:
    """int64 `[in]`, ascending."""
    starts, stops, groups = torch.tensor(weight.runs).unbind(1)
    return groups.repeat_interleave(stops - starts)
