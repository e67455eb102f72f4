"""Float32 weights a second time in float16, for the steps of few tokens that a CPU computes.

A decode reads every weight for each token, so half the bytes are half the work. Nothing is given up for it: inputs,
sums and results stay float32, and only weights that float16 holds are kept so. Those of nearly every published
checkpoint are: a bfloat16 has 8 significant bits and a float16 11, which leaves the tiny ones, below 2 ** -14. They are
rounded by 2 ** -25 at most; a sum of such products rounds away far more. A checkpoint in float32 fails the test below.

The products are FBGEMM's, which torch brings in two forms. One has little to do around the product and computes on one
thread; it is the best for a row or a few of a small weight. The other divides among threads. Against `two_layouts` on
two threads it takes two fifths to three quarters of the time for up to 8 rows, and is no slower up to 64 of a small
weight (`python -m benchmarks.layouts`). A small weight has a copy for each form. Beyond such numbers of rows the
arithmetic binds, not the bytes, and the float32 weight is used.

Packing takes some 15 ns a weight, which a start would feel: hence MOST_PACKED_ELEMENTS for a whole model.

torch 2.11 calls the one-thread functions deprecated. Where a later one has dropped them, the others do their work;
where it has dropped those, the float32 weight is used.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SMALL_ELEMENTS = 1 << 20
MOST_ROWS_OF_SMALL, MOST_ROWS = 64, 8
# Fewer are done before another thread is awake; on two threads of one core, twice as many are (checks of four requests
# by the demo model: 2 ** 22 gives 1.1 to 1.2 times the tokens per second of 2 ** 21, and all else as many).
MULTIPLICATIONS_PER_THREAD = 1 << 22
MOST_PACKED_ELEMENTS = 1 << 28  # of a model: some four seconds of packing
LARGEST_ERROR = 2.0**-20  # of the largest weight
CHECKED_FIRST = 1 << 12  # elements: enough to recognise a float32 checkpoint without reading the rest


@dataclass(frozen=True, slots=True)
class HalfWeight:
    """A weight `[in, out]` in float16, packed."""

    num_elements: int
    all_threads: int  # of the process when the weight was loaded; a step may compute with fewer
    divided: Any  # for any number of threads: a torch.ScriptObject
    alone: Tensor | None  # for one thread; None where the weight is large

    def product(self, x: Tensor) -> Tensor | None:
        """`x` `[T, in]` times the weight, float32 `[T, out]`; None where that is not the quickest way for such a step.

        It takes as many threads as the product is worth, and no fewer than the step has.
        """
        num_rows, threads = x.shape[0], torch.get_num_threads()
        if not 0 < num_rows <= (MOST_ROWS_OF_SMALL if self.num_elements <= SMALL_ELEMENTS else MOST_ROWS):
            return None
        wanted = min(self.all_threads, num_rows * self.num_elements // MULTIPLICATIONS_PER_THREAD)
        if wanted <= threads:
            if threads == 1 and self.alone is not None:
                return torch.fbgemm_linear_fp16_weight_fp32_activation(x, self.alone, None)
            return _divided(x, self.divided)
        torch.set_num_threads(wanted)
        try:
            return _divided(x, self.divided)
        finally:
            torch.set_num_threads(threads)


def _divided(x: Tensor, packed: Any) -> Tensor:
    product: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    return product


def packed_bytes(num_elements: int) -> int:
    """Return the bytes of the copies of such a weight."""
    return num_elements * torch.float16.itemsize * (2 if num_elements <= SMALL_ELEMENTS else 1)


def half_copy(weight: Tensor) -> HalfWeight | None:
    """Return `weight` `[in, out]` packed; None where float16 does not hold it, or this machine has no such product."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not weight.numel():
        return None
    if not _has_products():
        return None
    if not (_is_held(weight[: 1 + CHECKED_FIRST // weight.shape[1]]) and _is_held(weight)):
        return None
    by_output = weight.t().contiguous()
    alone = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if weight.numel() <= SMALL_ELEMENTS and hasattr(torch, "fbgemm_linear_fp16_weight_fp32_activation"):
            alone = torch.fbgemm_pack_gemm_matrix_fp16(by_output)
            torch.fbgemm_linear_fp16_weight_fp32_activation(weight.new_zeros(1, weight.shape[0]), alone, None)
        divided = torch.ops.quantized.linear_prepack_fp16(by_output, None)
    return HalfWeight(weight.numel(), torch.get_num_threads(), divided, alone)


def _has_products() -> bool:
    """Whether this machine and this torch have FBGEMM's float16 products."""
    return (
        torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and torch.backends.quantized.engine in ("x86", "fbgemm")
        and hasattr(torch.ops.quantized, "linear_prepack_fp16")
        and hasattr(torch.ops.quantized, "linear_dynamic_fp16")
    )


def _is_held(weight: Tensor) -> bool:
    error = (weight.half().float() - weight).abs().max()  # infinite where a weight is beyond float16
    return bool(error <= LARGEST_ERROR * weight.abs().max())
