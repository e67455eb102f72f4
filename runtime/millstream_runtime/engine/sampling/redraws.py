"""Draw by top-p on a GPU: the tokens of `draw_on_host`, without a sort and without waiting for the device.

A token stands if the tokens above it hold less than `top_p` of the row; otherwise the next draw is from what is above
it. The host cannot see which rows are done, so each row gets as many draws as it could ever need. What is above the
n-th draw holds at most U1 * .. * Un of the row, with uniform U, and the draw is refused while that is `top_p` or more:

    P(n draws are refused) <= P(U1 * .. * Un >= top_p) = P(Poisson(ln(1 / top_p)) >= n)

because -ln U is exponential. `max_draws` makes that less than 2 ** -53, the resolution of the uniform numbers: 10 at
a top_p of 0.9, 16 at 0.5, and never more than 51 in a vocabulary of 150,000.

Bytes: about 24 * V per row and redraw: a comparison, and a cumulative sum in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import lru_cache

import torch
from torch import Tensor

from millstream_runtime.engine.transfer import on_device

Numbers = Callable[[int, int], float]
"""(row, attempt) -> a uniform number in [0, 1) that depends on nothing else in the batch."""

_NEGLIGIBLE = 2.0**-53


def draw_from(weights: Tensor, numbers: Seq[float]) -> Tensor:
    """`weights` `[R, vocab]`, cut, to token ids `[R]` int64, by a number in [0, 1) for each row."""
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    return _invert(sums, on_device(numbers, weights.device, torch.float64))


def draw_by_redraws(weights: Tensor, top_p: Seq[float], numbers: Numbers) -> Tensor:
    """`weights` `[R, vocab]` float32, cut by the other filters, each row's highest 1, to token ids `[R]` int64.

    Enqueues work for the device and waits for none of it.
    """
    num_draws = [max_draws(share, weights.shape[-1]) for share in top_p]
    # Rows with many draws come first, so that the others drop out at the end.
    order = sorted(range(len(top_p)), key=lambda row: -num_draws[row])
    num_attempts = num_draws[order[0]]
    if num_attempts == 1:
        return draw_from(weights, [numbers(row, 0) for row in range(len(top_p))])
    place = on_device(order, weights.device)
    attempts = [[numbers(row, attempt) for row in order] for attempt in range(num_attempts)]
    shares = on_device(attempts, weights.device, torch.float64)
    left = weights.index_select(0, place)
    sums = left.cumsum(dim=-1, dtype=torch.float64)
    limits = on_device([top_p[row] for row in order], weights.device, torch.float64)[:, None] * sums[:, -1:]
    tokens = _invert(sums, shares[0])
    for attempt in range(1, num_attempts):
        num_rows = sum(num_draws[row] > attempt for row in order)
        tokens[:num_rows] = _redraw(left[:num_rows], tokens[:num_rows], limits[:num_rows], shares[attempt, :num_rows])
    return torch.empty_like(tokens).index_copy_(0, place, tokens)


def _redraw(weights: Tensor, tokens: Tensor, limits: Tensor, shares: Tensor) -> Tensor:
    """`tokens` `[R]` where they stand, and draws from what is above them elsewhere. `limits` `[R, 1]` float64."""
    heavier = torch.where(weights > weights.gather(1, tokens[:, None]), weights, 0.0)
    sums = heavier.cumsum(dim=-1, dtype=torch.float64)
    totals = sums[:, -1:]
    stands = (totals < limits) | (totals == 0)
    return torch.where(stands.squeeze(1), tokens, _invert(sums, shares))


@lru_cache(1024)
def max_draws(top_p: float, vocab_size: int) -> int:
    """How many draws from a row suffice, but for a chance below 2 ** -53."""
    # What is above a refused draw has at least the highest weight, 1, of at most `vocab_size`.
    rate = -math.log(max(top_p, 1 / vocab_size))
    num_draws = 1
    while _poisson_tail(rate, num_draws) >= _NEGLIGIBLE:
        num_draws += 1
    return num_draws


def _poisson_tail(rate: float, least: int) -> float:
    """P(Poisson(rate) >= least); added up from its first term, which a difference from 1 would lose."""
    term = math.exp(-rate)
    for number in range(1, least + 1):
        term *= rate / number
    total, number = 0.0, least
    while term > total * 2.0**-53:
        total += term
        number += 1
        term *= rate / number
    return total


def _invert(sums: Tensor, shares: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds a row's share of the total: never one of weight 0."""
    target = shares[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, target, right=True).squeeze(1).clamp_(max=sums.shape[-1] - 1)
