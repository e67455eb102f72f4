"""A token of the target's distribution p, by a draft that was drawn from q (Leviathan et al. 2023, arXiv 2211.17192).

    the draft d stands with probability min(1, p(d) / q(d)); else the token is drawn from max(0, p - q)

    P(token = x) = min(p(x), q(x)) + (1 - a) * max(0, p(x) - q(x)) / (1 - a) = p(x),    a = sum of min(p, q)

because a draft x comes up and stands with q(x) min(1, p(x) / q(x)) = min(p(x), q(x)), no draft stands with 1 - a, and
1 - a is also the sum of max(0, p - q). So the token is p's whatever q is, as long as the draft was drawn from q by a
number of its own; a is the chance that the draft stands. Numpy, one row: it does not depend on its batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Weights = npt.NDArray[np.float32]

# Attempts of `sampler.uniform` that no draw without drafts comes to: each of its attempts halves what is left.
DRAFT, STANDS, INSTEAD = 1 << 15, (1 << 15) + 1, (1 << 15) + 2


class Proposal(NamedTuple):
    """A draft and what it was drawn from: `probabilities` `[V]` float32, which add up to 1."""

    token_id: int
    probabilities: Weights


def draw_by_proposal(weights: Weights, proposal: Proposal, stands: float, instead: float) -> int:
    """Return the draft, or another token: distributed as `weights` `[vocab]`, which need not add up to 1.

    `proposal` may have fewer tokens: the others have a probability of 0. A row that is not finite gives any token.

    Args:
        stands: the uniform number in [0, 1) that decides whether the draft stands.
        instead: the one that draws another token.
    """
    draft, drawn_from = proposal
    total = weights.sum(dtype=np.float64).item()
    if stands * drawn_from.item(draft) * total < weights.item(draft):
        return draft
    left = weights / total
    left[: len(drawn_from)] -= drawn_from
    sums = left.clip(0, out=left).cumsum(dtype=np.float64)
    if not sums.item(-1) > 0:
        return draft  # p and q are equal but for rounding
    return min(int(sums.searchsorted(instead * sums.item(-1), "right")), len(sums) - 1)
