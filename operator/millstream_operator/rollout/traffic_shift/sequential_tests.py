"""Sequential tests whose answer is valid whenever it is looked at. Pure.

Each returns the logarithm of an e-value: a number that is 1 or less in expectation while the hypothesis holds. The
product over looks is then a supermartingale, so by Ville's inequality it exceeds 1 / alpha with probability alpha at
most, over all looks together, however often one looks and for whatever reason one stops (Ramdas, Gruenwald, Vovk and
Shafer, "Game-theoretic statistics and safe anytime-valid inference", 2023). Several alternatives are averaged, the
method of mixtures (Robbins, "Statistical methods related to the law of the iterated logarithm", 1970).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_SMALLEST_LOG_TERM = -40.0  # a term of a sum, relative to the largest, that changes nothing any more


def mixture(logs: Sequence[float]) -> float:
    """Return the logarithm of the mean of e-values, given by their logarithms."""
    return _log_sum(logs) - math.log(len(logs))


def odds_evidence(hits: int, size: int, other_hits: int, other_size: int, odds: float, null: float = 1.0) -> float:
    """Return the evidence of one look that the odds of a hit are `odds` times the other side's, and not `null` times.

    Given the hits of both sides together, those of one side follow Fisher's noncentral hypergeometric distribution,
    which knows the ratio of the odds alone: the rate may change from look to look, and so may both sides' shares of
    the requests. The likelihood ratio of two such distributions is an e-value for every ratio on the other side of
    `null` than `odds`, too, because the distributions are ordered by it (monotone likelihood ratio).
    """
    log_odds, log_null = math.log(odds), math.log(null)
    shape = hits + other_hits, size, other_size
    return (
        hits * (log_odds - log_null)
        - _log_hypergeometric_sum(*shape, log_odds)
        + _log_hypergeometric_sum(*shape, log_null)
    )


def share_evidence(hits: int, other_hits: int, share: float, odds: float) -> float:
    """Return the evidence of one look that hits on this side come `odds` times as often, per exposure, as on the other.

    `share`: this side's part of the exposure, above 0 and below 1.
    """
    return hits * math.log(odds) - (hits + other_hits) * math.log1p((odds - 1) * share)


def rate_evidence(hits: int, size: int, rate: float, null: float) -> float:
    """Return the evidence of one look that hits have the probability `rate`, and not `null` or one beyond it."""
    return hits * math.log(rate / null) + (size - hits) * math.log((1 - rate) / (1 - null))


def mean_evidence(difference: float, variance: float, size: float, first_size: float) -> float:
    """Return the evidence of all values so far that a difference of means is above 0.

    `variance`: of the difference. `size`: values so far, and `first_size`: those at the first look. A mixture of normal
    alternatives with a half-normal prior whose scale is the standard error at the first look. Valid at every look in
    the limit of many values ("Time-uniform central limit theory and asymptotic confidence sequences", Waudby-Smith,
    Arbour, Sinha, Kennedy and Ramdas, 2024): it needs values of finite variance, and not their distribution.
    """
    if variance <= 0.0:
        return 0.0 if difference == 0.0 else math.copysign(math.inf, difference)
    ratio, score = size / first_size, difference / math.sqrt(variance)
    shrunk = score * math.sqrt(ratio / (1 + ratio))
    above = math.erfc(-shrunk / math.sqrt(2))  # twice the normal distribution function
    return -0.5 * math.log1p(ratio) + 0.5 * shrunk * shrunk + (math.log(above) if above > 0 else -math.inf)


def _log_hypergeometric_sum(hits: int, size: int, other_size: int, log_odds: float) -> float:
    """Return log of the sum over k of C(size, k) C(other_size, hits - k) odds^k.

    From the largest term outwards, so it takes as many steps as the distribution is wide, not as there are hits.
    """
    least, most = max(0, hits - other_size), min(size, hits)

    def step(count: int) -> float:
        """The logarithm of the term of count + 1 over that of count: it falls as the count grows."""
        ways = math.log((hits - count) * (size - count)) - math.log((count + 1) * (other_size - hits + count + 1))
        return ways + log_odds

    low, high = least, most
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if step(middle) > 0 else (low, middle)
    mode, total = low, 1.0
    for direction in (1, -1):
        count, log_term = mode, 0.0
        while (count < most) if direction > 0 else (count > least):
            log_term += step(count) if direction > 0 else -step(count - 1)
            if log_term < _SMALLEST_LOG_TERM:
                break
            count, total = count + direction, total + math.exp(log_term)
    peak = _log_choose(size, mode) + _log_choose(other_size, hits - mode) + mode * log_odds
    return peak + math.log(total)


def _log_choose(of: int, chosen: int) -> float:
    return math.lgamma(of + 1) - math.lgamma(chosen + 1) - math.lgamma(of - chosen + 1)


def _log_sum(logs: Sequence[float]) -> float:
    largest = max(logs)
    if math.isinf(largest):
        return largest
    return largest + math.log(sum(math.exp(value - largest) for value in logs))
