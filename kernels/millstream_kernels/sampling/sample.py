"""One token of each row of logits: temperature, min-p, top-k, top-p and a draw, without sorting a vocabulary.

Mathematics, per row, l its logits after bias and penalties:

    w = exp((l - max l) / temperature)          float32, the highest is 1; 0 where w < min_p
    k kept      w >= the k-th largest           those that equal it are kept too
    p kept      w such that the larger ones of those hold less than top_p of their sum
    token       the first whose cumulative weight, in the order of the vocabulary, exceeds u * the sum of what is left

What is left are all of top-k at first. A token that is not among those of p is refused, the larger ones are what is
left, and the next u draws from them: the rule of `engine/sampling/draw_on_host.py`, so a seed means the same token.

Top-k asks for the largest threshold t with G(t) >= k, where G(t) is how many weights are >= t. Weights are not
negative, so their order is that of their bits, and the threshold is found 4 bits at a time:

    bits of w   | 29 .. 26 | 25 .. 22 | .. | 5 .. 2 | 1 0 |        8 passes over the row; each sums G at 16 thresholds
                  ^ the highest digit with G >= limit, then the next below it

The result is exact, whatever the distribution: no candidate list that could be too short. A row whose temperature is 0
takes the first of its highest logits, and one whose highest is not finite (NaN, all masked) is -1. Sums are in float64,
and u is the engine's (`uniform`). One program per row: a row has one result, whatever its company.

Bytes:  V * element size per row and pass, from L2 after the first: 3 passes, 8 more with top-k, 1 with top-p, and 2
        for each draw that is refused.
FLOPs:  about 40 * V per pass of a filter.   Bound by passes, and by one multiprocessor per row.

Bias and penalties touch a few logits of a row; the engine does them before (`logits_processors`).
The filters as in Fan et al. 2018 (arXiv 1805.04833), Holtzman et al. 2019 (arXiv 1904.09751) and Nguyen et al. 2024
(arXiv 2407.01082).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.arguments import require, require_tensor, require_unit_stride
from millstream_kernels.sampling.uniform import uniform
from millstream_kernels.variant import TensorCores, Variant

DTYPES = {torch.bfloat16, torch.float16, torch.float32}
BLOCK = 2048
NUM_WARPS = 8


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What each of R rows asks for; all `[R]`, contiguous, on the device."""

    temperatures: Tensor  # float32; 0: the highest logit
    top_k: Tensor  # int32; 0: all
    top_p: Tensor  # float64, as the engine's on a CPU; 1: all
    min_p: Tensor  # float32, of the highest weight; 0: all
    seeds: Tensor  # int64
    positions: Tensor  # int64, of the token that is drawn


@triton.jit
def _weights(row, start, size, highest, temperature, least, BLOCK: tl.constexpr):
    """Columns of a tile and their weights, 0 beyond the row."""
    columns = start + tl.arange(0, BLOCK)
    logits = tl.load(row + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
    weights = tl.exp(tl.div_rn(logits - highest, temperature))
    return columns, tl.where(weights < least, 0.0, weights)


@triton.jit
def _highest_logit(row, size, BLOCK: tl.constexpr):
    """The highest logit, the first token that has it, and whether all are numbers."""
    highest = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 0, tl.int32)
    has_nan = tl.full((), 0, tl.int32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(row + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        is_nan = logits != logits
        has_nan = tl.maximum(has_nan, tl.max(is_nan.to(tl.int32), 0))
        logits = tl.where(is_nan, float("-inf"), logits)
        of_tile = tl.max(logits, 0)
        first = tl.min(tl.where(logits == of_tile, columns, 2147483647), 0)
        token = tl.where(of_tile > highest, first, token)
        highest = tl.maximum(highest, of_tile)
    return highest, token, has_nan == 0


@triton.jit
def _threshold(row, size, highest, temperature, least, limit, BLOCK: tl.constexpr):
    """The bits of the largest t with G(t) >= limit. `size` 0: 0."""
    digits = tl.arange(0, 16)
    found = tl.full((), 0, tl.int32)
    for step in range(8):
        # The last step has two bits left: a digit above 3 would have been found a step before.
        shift = tl.maximum(26 - 4 * step, 0)
        thresholds = found + (digits << shift)
        reached = tl.zeros((16,), tl.int32)
        for start in range(0, size, BLOCK):
            _, weights = _weights(row, start, size, highest, temperature, least, BLOCK)
            bits = weights.to(tl.int32, bitcast=True)
            reached += tl.sum((bits[None, :] >= thresholds[:, None]).to(tl.int32), 1)
        found += tl.max(tl.where(reached >= limit, digits, 0), 0) << shift
    return tl.where(size > 0, found, 0)


@triton.jit
def _kept_sum(row, size, highest, temperature, least, lowest, BLOCK: tl.constexpr):
    """Sum of the weights whose bits are `lowest` or more, in float64."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, size, BLOCK):
        _, weights = _weights(row, start, size, highest, temperature, least, BLOCK)
        kept = tl.where(weights.to(tl.int32, bitcast=True) >= lowest, weights.to(tl.float64), 0.0)
        total += tl.sum(kept, 0)
    return total


@triton.jit
def _token_at(row, size, highest, temperature, least, lowest, target, BLOCK: tl.constexpr):
    """The first token whose cumulative weight exceeds `target`; if rounding leaves none, the last that is kept."""
    before = tl.full((), 0.0, tl.float64)
    token = tl.full((), 2147483647, tl.int32)
    last = tl.full((), 0, tl.int32)
    for start in range(0, size, BLOCK):
        columns, weights = _weights(row, start, size, highest, temperature, least, BLOCK)
        is_kept = (weights.to(tl.int32, bitcast=True) >= lowest) & (weights > 0.0)
        kept = tl.where(is_kept, weights.to(tl.float64), 0.0)
        exceeds = is_kept & (before + tl.cumsum(kept, 0) > target)
        token = tl.minimum(token, tl.min(tl.where(exceeds, columns, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(is_kept, columns, 0), 0))
        before += tl.sum(kept, 0)
    return tl.where(token == 2147483647, last, token)


@triton.jit
def _bits_of(row, size, highest, temperature, least, token, BLOCK: tl.constexpr):
    """The bits of one token's weight, by the instructions that compute all of a tile."""
    columns, weights = _weights(row, token // BLOCK * BLOCK, size, highest, temperature, least, BLOCK)
    return tl.max(tl.where(columns == token, weights.to(tl.int32, bitcast=True), 0), 0)


@triton.jit(do_not_specialize=["logits_row", "size", "attempt"])
def sample_row(
    logits, temperatures, top_k, top_p, min_p, seeds, positions, tokens, logits_row, size, attempt, BLOCK: tl.constexpr
):
    """One row."""
    program = tl.program_id(0)
    row = logits + program.to(tl.int64) * logits_row
    highest, token, is_number = _highest_logit(row, size, BLOCK)
    is_finite = is_number & (tl.abs(highest) < float("inf"))
    temperature = tl.load(temperatures + program)
    is_drawn = is_finite & (temperature > 0.0)
    temperature = tl.maximum(temperature, 1e-30)  # float32 has no smaller ones to divide by
    least, k, p = tl.load(min_p + program), tl.load(top_k + program), tl.load(top_p + program)
    drawn_size = tl.where(is_drawn, size, 0)  # a loop that is not needed makes no pass

    k_size = tl.where((k > 0) & (k < size), drawn_size, 0)
    lowest = _threshold(row, k_size, highest, temperature, least, k, BLOCK)
    total = _kept_sum(row, drawn_size, highest, temperature, least, lowest, BLOCK)
    limit = p * total
    p_size = tl.where(p < 1.0, drawn_size, 0)
    seed, position, number = tl.load(seeds + program), tl.load(positions + program), attempt.to(tl.int64)
    is_refused = is_drawn
    while is_refused:
        share = uniform(seed, position, number)
        token = _token_at(row, size, highest, temperature, least, lowest, share * total, BLOCK)
        lowest = _bits_of(row, p_size, highest, temperature, least, token, BLOCK) + 1
        total = _kept_sum(row, p_size, highest, temperature, least, lowest, BLOCK)
        is_refused = (total >= limit) & (total > 0.0)
        number += 1
    tl.store(tokens + program, tl.where(is_finite, token, -1).to(tl.int64))


def sample_tokens(logits: Tensor, rows: SamplingRows, *, attempt: int = 0, tokens: Tensor | None = None) -> Tensor:
    """Return a token per row, `[R]` int64; -1 where the highest logit is not finite.

    Args:
        logits: `[R, V]` in bfloat16, float16 or float32, after bias and penalties; dense rows. A masked token has
            minus infinity. Not changed.
        attempt: how often a draw for these tokens was refused before.
        tokens: `[R]` int64, contiguous; allocated by default.

    Raises:
        KernelArgumentError: naming the argument.
    """
    require_tensor("logits", logits, (None, None), DTYPES)
    require_unit_stride("logits", logits)
    count, size = logits.shape
    require(0 < size < 1 << 30, "logits", f"has rows of {size}; 1 to 2 ** 30 - 1 are expected")
    for name, values, dtype in (
        ("temperatures", rows.temperatures, torch.float32),
        ("top_k", rows.top_k, torch.int32),
        ("top_p", rows.top_p, torch.float64),
        ("min_p", rows.min_p, torch.float32),
        ("seeds", rows.seeds, torch.int64),
        ("positions", rows.positions, torch.int64),
    ):
        require_tensor(name, values, (count,), {dtype})
        require(values.is_contiguous(), name, "is not contiguous")
    require(0 <= attempt < 1 << 15, "attempt", f"is {attempt}; 0 to 32767 are expected")
    if tokens is None:
        tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    require_tensor("tokens", tokens, (count,), {torch.int64})
    require(tokens.is_contiguous(), "tokens", "is not contiguous")
    if count:
        sample_row[(count,)](
            logits,
            rows.temperatures,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            rows.seeds,
            rows.positions,
            tokens,
            logits.stride(0),
            size,
            attempt,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return tokens


def sample_variants() -> Iterator[Variant]:
    """Logits of a model, and after penalties. Rows of a vocabulary of any size begin anywhere: loads are short."""
    for dtype in ("bf16", "fp32"):
        arguments = {"logits": f"*{dtype}", "temperatures": "*fp32", "top_k": "*i32", "top_p": "*fp64"}
        arguments |= {"min_p": "*fp32", "seeds": "*i64", "positions": "*i64", "tokens": "*i64"}
        arguments |= dict.fromkeys(sample_row.arg_names[8:11], "i32")
        yield Variant(dtype, sample_row, arguments, {"BLOCK": BLOCK}, TensorCores.NONE, NUM_WARPS, wide_loads=False)
