"""Small float32 weights a second time in float16, for the steps of few tokens that one CPU thread computes.

A decode reads every weight for each token, so half the bytes are half the work. Nothing is given up for it: inputs,
sums and results stay float32, and only weights that float16 holds are kept so. Those of nearly every published
checkpoint are: a bfloat16 has 8 significant bits and a float16 11, which leaves the tiny ones, below 2 ** -14. They are
rounded by 2 ** -25 at most; a sum of such products rounds away far more. A checkpoint in float32 fails the test below.

The product is FBGEMM's, which torch brings: 1.8 times as fast as MKL's on float32 at 1 row, and twice at 16, but on one
thread only. So the float32 weight stays, for prompts and for steps on several threads, and larger layers, whose second
copy would be felt in memory and in the start (16 ns a weight), have none.

torch 2.11 calls these two functions deprecated. Where a later one has dropped them, every step takes the float32 way.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

MOST_ELEMENTS = 1 << 20
MOST_ROWS = 64  # beyond them the arithmetic binds, not the bytes
LARGEST_ERROR = 2.0**-20  # of the largest weight


def half_copy(weight: Tensor) -> Tensor | None:
    """`weight` `[in, out]` packed for `half_product`; None where it is large, not held by float16, or not on x86."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not 0 < weight.numel() <= MOST_ELEMENTS:
        return None
    if not hasattr(torch, "fbgemm_linear_fp16_weight_fp32_activation"):
        return None
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return None
    error = (weight.half().float() - weight).abs().max()  # infinite where a weight is beyond float16
    if error > LARGEST_ERROR * weight.abs().max():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        packed = torch.fbgemm_pack_gemm_matrix_fp16(weight.t().contiguous())
        half_product(weight.new_zeros(1, weight.shape[0]), packed, None)  # which warns once as well
    return packed


def serves(x: Tensor) -> bool:
    """Whether a step of these rows is one for the packed weight."""
    return x.shape[0] <= MOST_ROWS and torch.get_num_threads() == 1


def half_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`[T, in]` to `[T, out]`, float32."""
    return torch.fbgemm_linear_fp16_weight_fp32_activation(x, packed, bias)
