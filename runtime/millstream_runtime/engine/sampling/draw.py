"""Weights -> one token of each row, cut by min-p, then top-k, then top-p of what is left.

Nothing here sorts a vocabulary where it can be helped: 16 rows of 49,152 take longer to sort than everything else that
sampling does. Top-k wants its k highest only. And top-p does not need its nucleus at all to draw from it: draw from the
whole row, and ask of the one token that came up whether those above it hold less than top_p. If they do, it is in the
nucleus and stands. If not, the nucleus lies above it, so the next draw is from what is above it. What stands is
distributed exactly as in the nucleus, and mostly it is the first draw (FlashInfer's sorting-free rejection sampling).

That needs an answer before it can go on. On a GPU, where a step may wait for nothing, the nucleus is cut from a sorted
row, or from the k highest where the row has a top_k.

A filter is computed for the rows that ask for it: a row without one is neither sorted nor searched for another's sake.

Tokens that are as likely as the last one kept are kept too, as in transformers' and vLLM's top-k: the order of the
vocabulary decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

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
        cut_nuclei(weights, params)
        nucleus = []
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    tokens = _invert(cumulative, [numbers(row, 0) for row in range(len(params))])
    if nucleus:
        whole = len(nucleus) == len(params)
        limits = [
            params[row].top_p * total for row, total in zip(nucleus, cumulative[nucleus, -1].tolist(), strict=True)
        ]
        _redraw_until_in_nucleus(tokens, weights if whole else weights[nucleus], limits, nucleus, numbers)
    return tokens


def cut_nuclei(weights: Tensor, params: Seq[SamplingParams]) -> None:
    """Zero what is less likely than the last token of each row's nucleus, without waiting.

    `weights` `[R, vocab]` are cut by top-k: of a row with a `top_k` its highest are enough, and only rows without one
    are sorted. Rows with a `top_p` of 1 are not touched.
    """
    for width, rows in _by_width(params, weights.shape[-1]).items():
        wanted = [row for row in rows if params[row].top_p < 1]
        if wanted:
            with _rows(weights, wanted) as some:
                _cut_top_p(some, [params[row].top_p for row in wanted], width)


def _cut_top_p(weights: Tensor, top_p: Seq[float], width: int) -> None:
    """`weights` `[R, vocab]`, of which each row has at most `width` above 0, or more that equal the least of these."""
    if width < weights.shape[-1]:
        ranked = weights.topk(width, dim=-1).values
        cumulative = ranked.cumsum(dim=-1, dtype=torch.float64)
        ties = ((weights > 0).sum(dim=-1, keepdim=True) - width).clamp_(min=0)
        total = cumulative[:, -1:] + ties * ranked[:, -1:]
    else:
        ranked = weights.sort(dim=-1, descending=True).values
        cumulative = ranked.cumsum(dim=-1, dtype=torch.float64)
        total = cumulative[:, -1:]
    limit = on_device(top_p, weights.device, torch.float64)[:, None] * total
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
    for width, rows in _by_width(params, weights.shape[-1]).items():
        wanted = [row for row in rows if 0 < params[row].top_k < weights.shape[-1]]
        if wanted:
            with _rows(weights, wanted) as some:
                best = some.topk(width, dim=-1).values
                place = on_device([params[row].top_k - 1 for row in wanted], weights.device)
                _zero_up_to(some, best.gather(1, place[:, None]).nextafter(best.new_full((), -1.0)))


def _zero_up_to(weights: Tensor, limits: Tensor) -> None:
    """Zero the `weights` `[R, vocab]` of each row that are not above its limit `[R, 1]`.

    On a CPU `masked_fill` and `where` branch on every number: 16 rows of 49,152 take 3.4 ms, and here 0.1.
    """
    if weights.is_cuda:
        weights.masked_fill_(weights <= limits, 0.0)
        return
    for row, limit in zip(weights, limits[:, 0].tolist(), strict=True):
        torch.threshold_(row, limit, 0.0)


def _by_width(params: Seq[SamplingParams], vocab_size: int) -> dict[int, list[int]]:
    """The rows by how many of their highest weights hold their top-k: a power of two, or all.

    So a row with a small `top_k` does not wait for the large one of another.
    """
    rows: dict[int, list[int]] = {}
    for row, one in enumerate(params):
        width = vocab_size if not one.top_k else min(1 << (one.top_k - 1).bit_length(), vocab_size)
        rows.setdefault(width, []).append(row)
    return rows


@contextmanager
def _rows(weights: Tensor, rows: list[int]) -> Iterator[Tensor]:
    """These rows of `weights`, to be changed in place: a copy that is put back, or all of it."""
    if len(rows) == len(weights):
        yield weights
        return
    place = on_device(rows, weights.device)
    some = weights.index_select(0, place)
    yield some
    weights.index_copy_(0, place, some)


def _redraw_until_in_nucleus(
    tokens: Tensor, weights: Tensor, limits: list[float], rows: list[int], numbers: Numbers
) -> None:
    """Replace each of `tokens` `[R]` at `rows` that has its limit or more of the weight above it.

    `weights` `[len(rows), vocab]` and `limits` are of `rows`. Every draw leaves fewer tokens to draw from, and about
    half of those outside the nucleus.
    """
    attempt = 0
    while True:
        weights = weights.clone()
        at = on_device(rows, tokens.device)
        _zero_up_to(weights, weights.gather(1, tokens[at][:, None]))
        # Nothing is above the best: it stands.
        outside = [row for row, total in enumerate(_totals(weights, limits)) if total >= limits[row] and total > 0]
        if not outside:
            return
        attempt += 1
        weights, limits, rows = weights[outside], [limits[row] for row in outside], [rows[row] for row in outside]
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        tokens[rows] = _invert(cumulative, [numbers(row, attempt) for row in rows])


def _totals(weights: Tensor, limits: list[float]) -> list[float]:
    """Sum each row of `weights` `[R, vocab]` in float64, to be compared with its limit.

    The order in which `sum` adds depends on the number of rows and threads. Where that could decide, what counts is the
    sum in the order of the vocabulary, so that no row depends on others.
    """
    totals: list[float] = weights.sum(dim=-1, dtype=torch.float64).tolist()
    for row, limit in enumerate(limits):
        if abs(totals[row] - limit) <= 1e-9 * limit:
            totals[row] = float(weights[row].cumsum(dim=-1, dtype=torch.float64)[-1])
    return totals


def _invert(cumulative: Tensor, shares: Seq[float]) -> Tensor:
    """The first index whose cumulative weight exceeds a row's share of the total: never one of weight 0."""
    target = on_device(shares, cumulative.device, torch.float64)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=cumulative.shape[-1] - 1)
