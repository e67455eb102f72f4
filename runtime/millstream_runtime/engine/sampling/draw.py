"""Weights -> one token of each row, cut by min-p, then top-k, then top-p of what is left.

Nothing here sorts a vocabulary where it can be helped: 16 rows of 49,152 take longer to sort than everything else that
sampling does. Top-k wants its k highest only. And top-p does not need its nucleus at all to draw from it: draw from the
whole row, and ask of the one token that came up whether those above it hold less than top_p. If they do, it is in the
nucleus and stands. If not, the nucleus lies above it, so the next draw is from what is above it. What stands is
distributed exactly as in the nucleus, and mostly it is the first draw (FlashInfer's sorting-free rejection sampling).

That needs an answer before it can go on. On a GPU, where a step may wait for nothing, the nucleus is cut by a sort.

Tokens that are as likely as the last one kept are kept too, as in transformers' and vLLM's top-k: the order of the
vocabulary decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.engine.transfer import on_device

Numbers = Callable[[int, int], float]
"""(row, attempt) -> a uniform number in [0, 1) that depends on nothing else in the batch."""


def draw(weights: Tensor, params: Seq[SamplingParams], numbers: Numbers) -> Tensor:
    """`weights` `[R, vocab]` float32, each row's highest 1, to token ids `[R]` int64 on the same device.

    `weights` is changed. A row that is not finite gives any token.
    """
    _cut_min_p(weights, params)
    _cut_top_k(weights, params)
    nucleus = [row for row, one in enumerate(params) if one.top_p < 1]
    if nucleus and weights.is_cuda:
        cut_top_p(weights, [one.top_p for one in params])
        nucleus = []
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    tokens = _invert(cumulative, [numbers(row, 0) for row in range(len(params))])
    if nucleus:
        held = on_device([params[row].top_p for row in nucleus], weights.device, torch.float64)
        if len(nucleus) < len(params):
            weights, totals = weights[nucleus], cumulative[nucleus, -1]
        else:
            totals = cumulative[:, -1]
        _redraw_until_in_nucleus(tokens, weights, held * totals, nucleus, numbers)
    return tokens


def cut_top_p(weights: Tensor, top_p: Seq[float]) -> None:
    """Zero what is less likely than the last token of each row's nucleus, with a sort and without waiting."""
    ranked = weights.sort(dim=-1, descending=True).values
    cumulative = ranked.cumsum(dim=-1, dtype=torch.float64)
    shares = [one if one < 1 else math.inf for one in top_p]  # 1 keeps what is lost in the rounding of the sum, too
    limit = on_device(shares, weights.device, torch.float64)[:, None] * cumulative[:, -1:]
    # A token stays while those before it hold less than the limit; the first always stays.
    outside = cumulative - ranked >= limit
    outside[:, 0] = False
    last = ranked.masked_fill_(outside, float("inf")).amin(dim=-1, keepdim=True)
    weights.masked_fill_(weights < last, 0.0)


def _cut_min_p(weights: Tensor, params: Seq[SamplingParams]) -> None:
    if any(one.min_p > 0 for one in params):
        least = on_device([one.min_p for one in params], weights.device)[:, None]  # of the highest, which is 1
        weights.masked_fill_(weights < least, 0.0)


def _cut_top_k(weights: Tensor, params: Seq[SamplingParams]) -> None:
    vocab_size = weights.shape[-1]
    top_k = [min(one.top_k, vocab_size) for one in params]
    if any(top_k):
        best = weights.topk(max(top_k), dim=-1).values
        place = on_device([max(k, 1) - 1 for k in top_k], weights.device)[:, None]
        last = best.gather(1, place)
        if not all(top_k):  # a row that asks for none keeps all
            last *= on_device([float(k > 0) for k in top_k], weights.device)[:, None]
        weights.masked_fill_(weights < last, 0.0)


def _redraw_until_in_nucleus(
    tokens: Tensor, weights: Tensor, limits: Tensor, rows: list[int], numbers: Numbers
) -> None:
    """Replace each of `tokens` `[R]` at `rows` that has `limits` `[len(rows)]` or more of the weight above it.

    `weights` are of `rows`. Every draw leaves fewer tokens to draw from, and about half of those outside the nucleus.
    """
    attempt, at = 0, on_device(rows, tokens.device)
    while True:
        drawn = weights.gather(1, tokens[at][:, None])
        above = torch.where(weights > drawn, weights, 0.0)
        held = above.sum(dim=-1, dtype=torch.float64)
        outside = ((held >= limits) & (held > 0)).nonzero().squeeze(1)  # nothing is above the best: it stands
        if not len(outside):
            return
        attempt += 1
        weights, limits, at = above[outside], limits[outside], at[outside]
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        tokens[at] = _invert(cumulative, [numbers(row, attempt) for row in at.tolist()])


def _invert(cumulative: Tensor, shares: Seq[float]) -> Tensor:
    """The first index whose cumulative weight exceeds a row's share of the total: never one of weight 0."""
    target = on_device(shares, cumulative.device, torch.float64)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=cumulative.shape[-1] - 1)
