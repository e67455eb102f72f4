"""How many drafts a step should check: as many as give the most tokens per second. Pure arithmetic.

    goodput(n) = (decodes + the n largest marginals) / seconds(n drafts)

A step gives one token per decode, and one more per draft that stands. Which n drafts: those most likely to stand. That
is right without a search, since within a request no draft is likelier than the one before it, so the n largest are
always first ones. SmartSpec (Liu et al. 2024, arXiv 2406.14066) chooses one length for the whole batch by goodput; with
a length per request, one that is hard to guess costs the others nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)  # a request


class Goodput(NamedTuple):
    """What a step is expected to give."""

    num_drafts: int
    tokens: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """0 where a step takes no time: nothing was measured."""
        return self.tokens / self.seconds if self.seconds else 0.0


def best_goodput(num_decodes: int, likeliest: Seq[float], seconds: Seq[float]) -> Goodput:
    """Return the number of drafts with the highest goodput, the fewest of equals.

    Args:
        likeliest: the marginals of all drafts, the largest first.
        seconds: what a step takes with 0, 1, 2, ... drafts per decode. Between them it is a line.
    """
    # Of a draft, between one number of drafts per decode and the next; and the least of those still to come.
    steps = [(after - before) / num_decodes for before, after in pairwise(seconds)]
    least_steps = [*accumulate(reversed(steps), min)][::-1]
    tokens, took = float(num_decodes), seconds[0]
    best_drafts, best_tokens, best_seconds = 0, tokens, took
    for num_drafts, marginal in enumerate(likeliest, 1):
        length = (num_drafts - 1) // num_decodes
        if marginal * best_seconds <= best_tokens * least_steps[length]:
            break  # neither this draft nor one behind it gives tokens at the rate that is reached already
        tokens += marginal
        took += steps[length]
        if tokens * best_seconds > best_tokens * took:
            best_drafts, best_tokens, best_seconds = num_drafts, tokens, took
    return Goodput(best_drafts, best_tokens, best_seconds)


def likeliest_first(marginals: Mapping[K, Seq[float]]) -> list[float]:
    """Return the marginals of all requests, the largest first."""
    return sorted((one for of in marginals.values() for one in of), reverse=True)


def lengths_from(marginals: Mapping[K, Seq[float]], least: float) -> dict[K, int]:
    """Return how many drafts of each request are at least so likely; requests without one are left out."""
    lengths = {one: _num_at_least(of, least) for one, of in marginals.items()}
    return {one: length for one, length in lengths.items() if length}


def _num_at_least(marginals: Seq[float], least: float) -> int:
    """How many are at least so large; none is larger than the one before it."""
    for place, marginal in enumerate(marginals):
        if marginal < least:
            return place
    return len(marginals)
