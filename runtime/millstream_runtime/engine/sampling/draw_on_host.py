"""Rows of weights on a CPU -> one token each, without a sort.

To draw from a nucleus, draw from the whole row, and ask whether the tokens above the one that came up hold less than
`top_p`. If they do, it is in the nucleus and stands. If not, the nucleus lies above it, so the next draw is from what
is above it. What stands is distributed exactly as in the nucleus, and mostly it is the first draw (FlashInfer's
sorting-free rejection sampling).

It is numpy, whose calls cost a fraction of torch's. Sums are float64 in the order of the vocabulary, so that a row
never depends on the rows of its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
import numpy.typing as npt

from millstream_runtime.engine.request import SamplingParams

Weights = npt.NDArray[np.float32]
Sums = npt.NDArray[np.float64]

_ROUNDING = 1e-9  # of a sum: far more than float64 loses when it adds up a vocabulary


def draw_rows(
    weights: Weights, sums: Sums, params: Seq[SamplingParams], numbers: Callable[[int, int], float]
) -> list[int]:
    """Return a token id of the nucleus of each row of `weights` `[R, vocab]`, whose highest is 1.

    Of a row that is not finite it is any id.

    Args:
        sums: `[R, vocab]`, the cumulative weights.
        numbers: the uniform number in [0, 1) of a row and an attempt.
    """
    tokens, last = [], weights.shape[-1] - 1
    for row, total in enumerate(sums[:, -1].tolist()):
        top_p = params[row].top_p
        token = min(int(sums[row].searchsorted(numbers(row, 0) * total, "right")), last)
        if top_p < 1 and not _surely_stands(weights.item(row, token), total, top_p * total):
            token = _accept_or_redraw(weights[row], token, top_p * total, partial(numbers, row))
        tokens.append(token)
    return tokens


def _accept_or_redraw(weights: Weights, token: int, limit: float, number: Callable[[int], float]) -> int:
    """Return `token`, the first draw of a row `[vocab]`, if what is above it holds less than `limit`; else a redraw."""
    attempt = 0
    ids: npt.NDArray[np.int64] | None = None  # of what is left; None: all are
    while True:
        above = (weights > weights.item(token)).nonzero()[0]
        heavier = weights.take(above)
        sums = heavier.cumsum(0, np.float64)
        total = sums.item(-1) if len(sums) else 0.0
        if total < limit or not len(sums):
            break
        # Every draw leaves fewer tokens to draw from, and about half of those outside the nucleus.
        attempt += 1
        weights, ids = heavier, above if ids is None else ids.take(above)
        token = _invert(sums, number(attempt))
        if _surely_stands(weights.item(token), total, limit):
            break
    return token if ids is None else ids.item(token)


def _surely_stands(weight: float, total: float, limit: float) -> bool:
    """Whether so little can be above a token of this `weight` that it need not be added up."""
    return weight >= 1 or total - weight < limit * (1 - _ROUNDING)


def _invert(sums: Sums, share: float) -> int:
    """The first index whose cumulative weight exceeds this share of the total: never one of weight 0."""
    return min(int(sums.searchsorted(share * sums.item(-1), "right")), len(sums) - 1)
