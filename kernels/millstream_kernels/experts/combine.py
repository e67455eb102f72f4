"""What a token's experts found, weighed by their shares and added to the residual stream.

Mathematics, per token t and number n, in float32, rounded once:

    out[t, n] = residual[t, n] + ((share[t, 0] * y[r(t, 0), n] + share[t, 1] * y[r(t, 1), n]) + ..)

`r(t, j)` is the row of its j-th expert (`Placement.places`). Experts come in the order of their numbers, so the order
of the sum depends on the token's own choice alone; atomic additions would come in any order.

Bytes:  k * N of the rows, 2 * N of the residual per token.
FLOPs:  2 * k * N per token.   Memory-bound.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.arguments import require, require_tensor, require_unit_stride
from millstream_kernels.experts.placement import Placement
from millstream_kernels.variant import TensorCores, Variant

DTYPES = {torch.bfloat16, torch.float16, torch.float32}
UNIT = 8
BLOCK, NUM_WARPS = 1024, 4


def plan(num_tokens: int, size: int) -> tuple[int, int]:
    """Return the grid: blocks of a row, tokens."""
    return triton.cdiv(size, BLOCK), num_tokens


@triton.jit(do_not_specialize=["residual_row", "size_units", "top_k"])
def combine_row(
    residual, computed, places, shares, residual_row, size_units, top_k, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    """`BLOCK` numbers of one token. `residual_row`, `size_units`: in units of `UNIT` numbers."""
    token = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    size = size_units * UNIT
    inside = columns < size
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(top_k):
        assignment = token * top_k + place
        row = tl.load(places + assignment).to(tl.int64)
        found = tl.load(computed + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(shares + assignment) * found
    targets = residual + token * residual_row * UNIT + columns
    total += tl.load(targets, mask=inside, other=0.0).to(tl.float32)
    tl.store(targets, total.to(residual.dtype.element_ty), mask=inside)


def combine(residual: Tensor, computed: Tensor, placement: Placement, shares: Tensor) -> None:
    """Add what the experts found to `residual` in place.

    Args:
        residual: `[T, N]` in bfloat16, float16 or float32; dense rows that do not overlap, N and their distance
            multiples of 8 numbers.
        computed: `[tiles * R, N]`, contiguous, in the residual's type (`expert_linear`).
        shares: `[T, k]` float32, contiguous.

    Raises:
        KernelArgumentError: naming the argument.
    """
    require_tensor("residual", residual, (None, None), DTYPES)
    require_unit_stride("residual", residual)
    count, size = residual.shape
    fits = size > 0 and size % UNIT == 0 and residual.stride(0) % UNIT == 0
    require(fits, "residual", f"has rows of {size}, {residual.stride(0)} apart; give multiples of {UNIT}")
    require(count <= 1 or residual.stride(0) >= size, "residual", "has rows that overlap")
    require_tensor("computed", computed, (placement.rows.shape[0], size), {residual.dtype})
    require(computed.is_contiguous(), "computed", "is not contiguous")
    require_tensor("shares", shares, (count, placement.top_k), {torch.float32})
    require(shares.is_contiguous(), "shares", "is not contiguous")
    fits = placement.places.shape[0] == count * placement.top_k
    require(fits, "placement", f"has {placement.places.shape[0]} assignments for {count} tokens")
    if count:
        combine_row[plan(count, size)](
            residual,
            computed,
            placement.places,
            shares,
            residual.stride(0) // UNIT,
            size // UNIT,
            placement.top_k,
            UNIT=UNIT,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def combine_variants() -> Iterator[Variant]:
    """Models in bfloat16."""
    arguments = {"residual": "*bf16", "computed": "*bf16", "places": "*i32", "shares": "*fp32"}
    arguments |= {"residual_row": "i32", "size_units": "i32", "top_k": "i32"}
    yield Variant("bf16", combine_row, arguments, {"UNIT": UNIT, "BLOCK": BLOCK}, TensorCores.NONE, NUM_WARPS)
