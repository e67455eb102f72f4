"""Products of 8-bit activations by 8-bit weights on a CPU, by FBGEMM's kernels, which torch brings for x86.

    m[t]    = largest |x[t, :]| / levels                    of each row by itself, LEAST_STEP at least
    q[t, k] = round(x[t, k] / m[t])                         -levels to levels
    y[t, n] = m[t] * scale[n] * sum over k of  q[t, k] * code[k, n]

Sums are int32, so they are exact and a row has the same result in any company. The operator quantizes its input by the
range that it finds there, one for all rows. Two more inputs with codes of 0 hold that range's ends: with them a step is
1, whatever the rows hold.

FBGEMM stores an activation as q + levels + 1, from 0 to 255. Without VNNI, AVX2 adds products of two neighbours in 16
bits, where 255 * 127 * 2 does not fit and is cut off. With 63 levels they fit. `_levels` computes the worst case once
and takes 127 levels only where the result is right.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millstream_runtime.models.linear.added_product import AddedProduct
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.models.linear.several import SideBySideLinear
from millstream_runtime.quantization.grouped_weight import GroupedWeight

END_INPUTS = 2
BLOCK_INPUTS, BLOCK_OUTPUTS = 512, 64  # at most: FBGEMM packs whole blocks
MOST_INPUTS = 1 << 15  # 255 * 128 * inputs stays below 2 ** 31
MOST_KEPT_ROWS = 64  # of a step's quantized inputs; more get new memory
LEAST_STEP = torch.finfo(torch.float32).tiny  # smaller ones have too few digits: a row would exceed its levels
OPERATORS = ("fbgemm_pack_quantized_matrix", "fbgemm_linear_int8_weight_fp32_activation")


@dataclass(frozen=True, slots=True)
class Int8Linear(AddedProduct):
    """See `Linear`. Inputs and results are float32."""

    packed: Tensor  # FBGEMM's, opaque
    shape: Tensor  # int8 [out, in + END_INPUTS] of one element: the operator reads its sizes alone
    code_sums: Tensor  # int32 [out]
    scales: Tensor  # float32 [out]
    no_bias: Tensor  # float32 [out], zeros
    levels: int
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """Float32 `[T, in]` to `[T, out]`."""
        num_rows, num_inputs = x.shape
        if not num_rows:
            return x.new_empty(0, self.scales.shape[0])
        product = self._of_few_rows(x.numpy()) if num_rows <= MOST_KEPT_ROWS else None
        if product is None:
            inputs, quantized = _buffer(num_rows, num_inputs, self.levels)
            steps = x.abs().amax(1, True).mul_(1 / self.levels).clamp_(min=LEAST_STEP)
            # What is NaN here has a step of NaN or infinity, and so has its row, whose product is NaN again.
            torch.div(x, steps, out=quantized).nan_to_num_(0.0, 0.0, 0.0)
            product = self._product(inputs).mul_(steps).mul_(self.scales)
        return product if self.bias is None else product.add_(self.bias)

    def _of_few_rows(self, x: np.ndarray[Any, Any]) -> Tensor | None:
        """The same in fewer microseconds, without the bias; None for rows of tiny numbers, NaN or infinities."""
        steps = np.abs(x).max(axis=1, keepdims=True)
        steps *= np.float32(1 / self.levels)
        if not (steps.min() >= LEAST_STEP and steps.max() < np.inf):
            return None
        inputs, quantized = _buffer(x.shape[0], x.shape[1], self.levels)
        np.divide(x, steps, out=quantized.numpy())
        product = self._product(inputs)
        result = product.numpy()
        with np.errstate(over="ignore"):  # infinite, as by torch, and without a warning
            result *= steps
            result *= self.scales.numpy()
        return product

    def _product(self, inputs: Tensor) -> Tensor:
        """`[T, in + END_INPUTS]` of whole numbers, with the ends of their range, by the codes."""
        product: Tensor = torch.fbgemm_linear_int8_weight_fp32_activation(
            inputs, self.shape, self.packed, self.code_sums, 1.0, 0, self.no_bias
        )
        return product

    def without_bias(self) -> Linear:
        return replace(self, bias=None)

    def reordered(self, order: list[int]) -> Linear:
        return SideBySideLinear((self,), torch.tensor(order))


def fits(weight: GroupedWeight) -> bool:
    """Whether the format asks for 8-bit activations, codes are int8 with a scale per output, and this machine can."""
    return (
        weight.quantizes_activations
        and weight.codes.dtype == torch.int8
        and isinstance(weight.zeros, int)
        and not weight.zeros
        and len(weight.scales) == 1
        and weight.order is None
        and weight.num_inputs <= MOST_INPUTS
        and levels() > 0
    )


def packed_bytes(weight: GroupedWeight) -> int:
    """Bytes of the layer of such a weight, whole blocks of FBGEMM counted."""
    inputs = -(-(weight.num_inputs + END_INPUTS) // BLOCK_INPUTS) * BLOCK_INPUTS
    outputs = -(-weight.num_outputs // BLOCK_OUTPUTS) * BLOCK_OUTPUTS
    return inputs * outputs + 3 * weight.num_outputs * torch.float32.itemsize


def int8_linear(weight: GroupedWeight, bias: Tensor | None) -> Int8Linear:
    """Return the layer of a weight that `fits`."""
    scales = weight.scales[0] if weight.columns is None else weight.scales[0].index_select(0, weight.columns)
    return _linear(weight.codes, scales.float(), levels(), bias)


@cache
def levels() -> int:
    """Steps from 0 to a row's largest number: 127, or 63 where 127 overflow; 0 where this machine has no such code."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return 0
    if not all(hasattr(torch, name) for name in OPERATORS):
        return 0
    return next((found for found in (127, 63) if _is_exact(found)), 0)


def _is_exact(levels: int) -> bool:
    """Whether the largest activations times the largest codes are computed without overflow, for few and many rows."""
    codes = torch.tensor([[127, -128, 127, -127]], dtype=torch.int8).expand(256, 4).clone()
    codes[1::2, 2:] *= -1
    linear = _linear(codes, torch.ones(4), levels, None)
    x = torch.full((40, 256), float(levels))
    x[:, 2::4] *= -1
    wanted = x.double() @ codes.double()
    return all(torch.equal(linear(x[:rows]).double(), wanted[:rows]) for rows in (1, 7, 40))


def _linear(codes: Tensor, scales: Tensor, levels: int, bias: Tensor | None) -> Int8Linear:
    """`codes` int8 `[in, out]`, `scales` float32 `[out]`."""
    by_output = torch.nn.functional.pad(codes.t(), (0, END_INPUTS)).contiguous()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch 2.11 calls the operators deprecated, once
        packed = torch.fbgemm_pack_quantized_matrix(by_output)
        linear = Int8Linear(
            packed=packed,
            shape=torch.zeros(1, dtype=torch.int8).expand(by_output.shape),
            code_sums=by_output.sum(1, dtype=torch.int32),
            scales=scales,
            no_bias=torch.zeros_like(scales),
            levels=levels,
            bias=bias,
        )
        linear(scales.new_zeros(1, codes.shape[0]))
    return linear


class _Buffers(threading.local):
    """Inputs of the operator, whose last columns are filled once: (rows, inputs, levels) -> whole, without the ends."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}


_BUFFERS = _Buffers()


def _buffer(num_rows: int, num_inputs: int, levels: int) -> tuple[Tensor, Tensor]:
    """Float32 `[T, in + END_INPUTS]` with the ends of the range, and its part `[T, in]`, to be written."""
    key = (num_rows, num_inputs, levels)
    if (found := _BUFFERS.kept.get(key)) is not None:
        return found
    if num_rows > MOST_KEPT_ROWS:
        return _new_buffer(num_rows, num_inputs, levels)
    most = (MOST_KEPT_ROWS, num_inputs, levels)
    if most not in _BUFFERS.kept:
        _BUFFERS.kept[most] = _new_buffer(*most)
    inputs = _BUFFERS.kept[most][0][:num_rows]
    _BUFFERS.kept[key] = (inputs, inputs[:, :num_inputs])
    return _BUFFERS.kept[key]


def _new_buffer(num_rows: int, num_inputs: int, levels: int) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # a tensor of inference mode could not be written to outside of it
        inputs = torch.empty(num_rows, num_inputs + END_INPUTS)
        inputs[:, num_inputs], inputs[:, num_inputs + 1] = -(levels + 1.0), 255.0 - (levels + 1)
    return inputs, inputs[:, :num_inputs]
