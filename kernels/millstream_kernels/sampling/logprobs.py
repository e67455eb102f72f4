"""Log-probabilities of one token of each row, its rank, and the most likely tokens, without sorting a vocabulary.

Mathematics, per row, l its logits as the model gave them, c its token, n at most 32:

    logprob(t) = (l_t - max l) - log(sum over j of exp(l_j - max l))
    rank(c)    = 1 + how many l_j > l_c
    best       the n highest logits, highest first; of equal ones the lower token first

The order of float32 is that of its bits, once those of negative numbers are turned. The n-th highest is found 4 bits at
a time, as in `sample`, then one pass puts what is higher, and the first tokens that equal it, into n places:

    bits of a logit   | 31 .. 28 | 27 .. 24 | .. | 3 .. 0 |      8 passes; each counts logits above 16 thresholds
    candidates        row       . x . . x . x x .  -> place = how many came before -> ordered among themselves

A row whose highest logit is not finite (NaN, all masked) gets NaN, rank 1 and tokens 0, 1, .. n - 1. One program per
row: a row has one result, whatever its company. The sum of exponentials is float32 within a tile of 1,024 and float64
beyond.

Bytes:  V * element size per row and pass, from L2 after the first: 2 passes, 9 more where n > 0.
FLOPs:  about 40 * V per pass of the search.   Bound by passes, and by one multiprocessor per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.arguments import require, require_tensor, require_unit_stride
from millstream_kernels.variant import TensorCores, Variant

DTYPES = {torch.bfloat16, torch.float16, torch.float32}
BLOCK = 1024
PLACES = 32  # of the most likely tokens; OpenAI's interface asks for 20 at most
NUM_WARPS = 8


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of R rows, on their device."""

    logprobs: Tensor  # float32 [R], of the given tokens
    ranks: Tensor  # int32 [R], 1 for the most likely
    best: Tensor  # float32 [R, n]
    best_tokens: Tensor  # int32 [R, n]


def plan(num_rows: int) -> tuple[int]:
    """Return the grid: rows."""
    return (num_rows,)


@triton.jit
def _ordered(logits):
    """int64 from 0 to 2^32 - 1, in the order of float32 logits; -0 and 0 are one."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _loaded(row, start, size, BLOCK: tl.constexpr):
    """Columns of a tile and their logits in float32, minus infinity beyond the row."""
    columns = start + tl.arange(0, BLOCK)
    return columns, tl.load(row + columns, mask=columns < size, other=float("-inf")).to(tl.float32)


@triton.jit
def _nth_highest(row, size, count, BLOCK: tl.constexpr):
    """The order of the `count`-th highest logit, and how many are higher. `size` 0: 0, 0."""
    digits = tl.arange(0, 16)
    found = tl.full((), 0, tl.int64)
    higher = tl.full((), 0, tl.int32)
    for step in range(8):
        thresholds = found + (digits.to(tl.int64) << (28 - 4 * step))
        reached = tl.zeros((16,), tl.int32)
        for start in range(0, size, BLOCK):
            columns, logits = _loaded(row, start, size, BLOCK)
            is_above = (columns < size)[:, None] & (_ordered(logits)[:, None] >= thresholds[None, :])
            reached += tl.sum(is_above.to(tl.int32), 0)
        digit = tl.max(tl.where(reached >= count, digits, 0), 0)
        # Those of the next threshold, or, behind the last, those that an earlier step counted.
        above = tl.sum(tl.where(digits == digit + 1, reached, 0), 0)
        higher = tl.where(digit < 15, above, higher)
        found += digit.to(tl.int64) << (28 - 4 * step)
    return tl.where(size > 0, found, 0), higher


@triton.jit
def _collected(row, size, count, lowest, higher, PLACES: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens and logits of the `count` highest, in the order of the vocabulary."""
    places = tl.arange(0, PLACES)
    tokens = tl.zeros((PLACES,), tl.int32)
    values = tl.zeros((PLACES,), tl.float32)
    before = tl.full((), 0, tl.int32)
    equal_before = tl.full((), 0, tl.int32)
    for start in range(0, size, BLOCK):
        columns, logits = _loaded(row, start, size, BLOCK)
        order = _ordered(logits)
        is_equal = (columns < size) & (order == lowest)
        nth_equal = equal_before + tl.cumsum(is_equal.to(tl.int32), 0)
        is_taken = ((columns < size) & (order > lowest)) | (is_equal & (nth_equal <= count - higher))
        place = before + tl.cumsum(is_taken.to(tl.int32), 0) - 1
        chosen = is_taken[:, None] & (place[:, None] == places[None, :])
        tokens += tl.sum(tl.where(chosen, columns[:, None], 0), 0)
        values += tl.sum(tl.where(chosen, logits[:, None], 0.0), 0)
        before += tl.sum(is_taken.to(tl.int32), 0)
        equal_before += tl.sum(is_equal.to(tl.int32), 0)
    return tokens, values


@triton.jit
def _ranks_among(tokens, values, count, PLACES: tl.constexpr):
    """The place of each candidate, highest first; of equal ones the lower token."""
    places = tl.arange(0, PLACES)
    # A column of the same numbers: through a sum, since a layout cannot be turned in one step.
    is_own = places[:, None] == places[None, :]
    other_values = tl.sum(tl.where(is_own, values[None, :], 0.0), 1)
    other_tokens = tl.sum(tl.where(is_own, tokens[None, :], 0), 1)
    goes_first = (other_values[:, None] > values[None, :]) | (
        (other_values[:, None] == values[None, :]) & (other_tokens[:, None] < tokens[None, :])
    )
    return tl.sum((goes_first & (places < count)[:, None]).to(tl.int32), 0)


@triton.jit(
    do_not_specialize=["logits_row", "size", "count"],
    do_not_specialize_on_alignment=["logits", "chosen"],  # rows of any vocabulary, a part of the tokens of a step
)
def describe_row(
    logits,
    chosen,
    logprobs,
    ranks,
    best,
    best_tokens,
    logits_row,
    size,
    count,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row. `best`, `best_tokens`: `[R, PLACES]`."""
    program = tl.program_id(0)
    row = logits + program.to(tl.int64) * logits_row
    highest = tl.full((), float("-inf"), tl.float32)
    has_nan = tl.full((), 0, tl.int32)
    for start in range(0, size, BLOCK):
        _, tile = _loaded(row, start, size, BLOCK)
        is_nan = tile != tile
        has_nan = tl.maximum(has_nan, tl.max(is_nan.to(tl.int32), 0))
        highest = tl.maximum(highest, tl.max(tl.where(is_nan, float("-inf"), tile), 0))
    is_finite = (has_nan == 0) & (tl.abs(highest) < float("inf"))

    own = tl.load(row + tl.load(chosen + program)).to(tl.float32)
    total = tl.full((), 0.0, tl.float64)
    num_higher = tl.full((), 0, tl.int32)
    finite_size = tl.where(is_finite, size, 0)
    for start in range(0, finite_size, BLOCK):
        _, tile = _loaded(row, start, size, BLOCK)
        total += tl.sum(tl.exp(tile - highest), 0).to(tl.float64)
        num_higher += tl.sum((tile > own).to(tl.int32), 0)
    log_total = tl.where(is_finite, tl.log(tl.where(is_finite, total, 1.0)), float("nan")).to(tl.float32)
    tl.store(logprobs + program, (own - highest) - log_total)
    tl.store(ranks + program, num_higher + 1)

    searched = tl.where(count > 0, finite_size, 0)
    lowest, higher = _nth_highest(row, searched, count, BLOCK)
    tokens, values = _collected(row, searched, count, lowest, higher, PLACES, BLOCK)
    places = tl.arange(0, PLACES)
    target = tl.where(is_finite, _ranks_among(tokens, values, count, PLACES), places)
    tokens = tl.where(is_finite, tokens, places)
    of_row = program.to(tl.int64) * PLACES + target
    tl.store(best + of_row, (values - highest) - log_total, mask=places < count)
    tl.store(best_tokens + of_row, tokens, mask=places < count)


def describe_tokens(logits: Tensor, tokens: Tensor, num_best: int) -> TokenLogprobs:
    """Return the log-probabilities and ranks of `tokens`, and those of the most likely tokens of each row.

    Args:
        logits: `[R, V]` in bfloat16, float16 or float32, as the model gave them; dense rows. Not changed.
        tokens: `[R]` int64, contiguous, 0 to V - 1.
        num_best: alternatives of each row, 0 to 32 and no more than V.

    Raises:
        KernelArgumentError: naming the argument.
    """
    require_tensor("logits", logits, (None, None), DTYPES, is_aligned=False)
    require_unit_stride("logits", logits)
    num_rows, size = logits.shape
    require(size > 0, "logits", "has no columns")
    require_tensor("tokens", tokens, (num_rows,), {torch.int64}, is_aligned=False)
    require(tokens.is_contiguous(), "tokens", "is not contiguous")
    most = min(PLACES, size)
    require(0 <= num_best <= most, "num_best", f"is {num_best}; 0 to {most} is expected")
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    best = torch.empty((num_rows, PLACES), dtype=torch.float32, device=logits.device)
    best_tokens = torch.empty((num_rows, PLACES), dtype=torch.int32, device=logits.device)
    if num_rows:
        describe_row[plan(num_rows)](
            logits,
            tokens,
            logprobs,
            ranks,
            best,
            best_tokens,
            logits.stride(0),
            size,
            num_best,
            PLACES=PLACES,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return TokenLogprobs(logprobs, ranks, best[:, :num_best], best_tokens[:, :num_best])


def logprobs_variants() -> Iterator[Variant]:
    """Logits of a model, and in float32. Rows of a vocabulary of any size begin anywhere: loads are short."""
    for dtype in ("bf16", "fp32"):
        arguments = {"logits": f"*{dtype}", "chosen": "*i64", "logprobs": "*fp32", "ranks": "*i32"}
        arguments |= {"best": "*fp32", "best_tokens": "*i32"}
        arguments |= dict.fromkeys(describe_row.arg_names[6:9], "i32")
        constants = {"PLACES": PLACES, "BLOCK": BLOCK}
        unaligned = frozenset({"logits", "chosen"})
        yield Variant(
            dtype,
            describe_row,
            arguments,
            constants,
            TensorCores.NONE,
            NUM_WARPS,
            unaligned=unaligned,
            wide_loads=False,
        )
