"""Weights -> one token of each row, cut by min-p, then top-k, then top-p of what is left.

Nothing here sorts a vocabulary where it can be helped: 16 rows of 49,152 take longer to sort than everything else that
sampling does. Top-k wants its k highest only. Top-p needs no nucleus to draw from it: a token is drawn from all, and
again from what is above it, until it stands. `draw_on_host` is the rule; `redraws`, for a GPU, where a step may wait
for nothing, draws the same tokens. Speculation compares with the nucleus itself: it is cut from a sorted row, or from
the k highest where the row has a top_k.

A filter is computed for the rows that ask for it: a row without one is neither sorted nor searched for another's sake.

Tokens that are as likely as the last one kept are kept too, as in transformers' and vLLM's top-k: the order of the
vocabulary decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.engine.sampling.draw_on_host import draw_rows
from millstream_runtime.engine.sampling.redraws import Numbers, draw_by_redraws
from millstream_runtime.engine.transfer import on_device

_SUMS_AT_ONCE = 1 << 16  # 512 KiB


def draw(weights: Tensor, params: Seq[SamplingParams], numbers: Numbers) -> Tensor:
    """`weights` `[R, vocab]` float32, each row's highest 1, to token ids `[R]` int64 on the same device.

    `weights` is changed. A row that is not finite gives any token.
    """
    _cut_min_p(weights, params)
    _cut_top_k(weights, params)
    if weights.device.type == "cpu":
        return torch.tensor(draw_on_host(weights, params, numbers), dtype=torch.int64)
    return draw_by_redraws(weights, [one.top_p for one in params], numbers)


def cut(weights: Tensor, params: Seq[SamplingParams]) -> None:
    """Zero the `weights` `[R, vocab]` of which `draw` never takes a token. Each row's highest is 1."""
    _cut_min_p(weights, params)
    _cut_top_k(weights, params)
    if any(one.top_p < 1 for one in params):
        cut_nuclei(weights, params)


def draw_on_host(weights: Tensor, params: Seq[SamplingParams], numbers: Numbers) -> list[int]:
    """`draw` of rows on a CPU that are cut already, or that have no `min_p` and no `top_k`.

    A few rows at a time, whose cumulative sums fit into a cache, and into memory that need not be mapped anew.
    """
    num_rows = max(1, _SUMS_AT_ONCE // weights.shape[-1])
    if num_rows >= len(params):
        return draw_rows(weights.numpy(), weights.cumsum(dim=-1, dtype=torch.float64).numpy(), params, numbers)
    tokens: list[int] = []
    for first in range(0, len(params), num_rows):
        some = weights[first : first + num_rows]
        sums = some.cumsum(dim=-1, dtype=torch.float64).numpy()
        tokens += draw_rows(some.numpy(), sums, params[first:], partial(_of_later_rows, numbers, first))
    return tokens


def _of_later_rows(numbers: Numbers, first: int, row: int, attempt: int) -> float:
    return numbers(first + row, attempt)


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
    if not any(one.top_k for one in params):
        return
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
    if weights.device.type != "cpu":
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
