"""Each e-value is 1 in expectation under its hypothesis, computed over every outcome with exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from millstream_operator.rollout.traffic_shift.sequential_tests import (
    mean_evidence,
    mixture,
    odds_evidence,
    rate_evidence,
    share_evidence,
)


def expected_over_both_sides(
    rates: tuple[Fraction, Fraction], sizes: tuple[int, int], odds: float, null: float
) -> float:
    """The mean of the e-value where each side's hits are binomial."""

    def chance(hits: int, size: int, rate: Fraction) -> Fraction:
        return math.comb(size, hits) * rate**hits * (1 - rate) ** (size - hits)

    return sum(
        float(chance(a, sizes[0], rates[0]) * chance(b, sizes[1], rates[1]))
        * math.exp(odds_evidence(a, sizes[0], b, sizes[1], odds, null))
        for a in range(sizes[0] + 1)
        for b in range(sizes[1] + 1)
    )


@pytest.mark.parametrize("sizes", [(3, 9), (9, 3), (6, 6), (0, 5), (5, 0)])
@pytest.mark.parametrize("odds", [1.5, 6.0])
def test_equal_rates_give_one_whatever_the_rate_is(sizes: tuple[int, int], odds: float) -> None:
    for rate in (Fraction(1, 100), Fraction(1, 2)):
        assert expected_over_both_sides((rate, rate), sizes, odds, 1.0) == pytest.approx(1.0, abs=1e-9)
    assert expected_over_both_sides((Fraction(1, 10), Fraction(1, 5)), sizes, odds, 1.0) <= 1 + 1e-9, (
        "better is no evidence"
    )


def test_a_ratio_of_odds_beyond_the_null_gives_at_most_one() -> None:
    # Odds of 1/9 and 1/27: a ratio of 3. Of 1/9 and 1/54: 6.
    at_null = expected_over_both_sides((Fraction(1, 10), Fraction(1, 28)), (6, 8), 1.0, 3.0)
    beyond = expected_over_both_sides((Fraction(1, 10), Fraction(1, 55)), (6, 8), 1.0, 3.0)
    assert at_null == pytest.approx(1.0, abs=1e-9)
    assert beyond < 1.0


def test_the_evidence_of_one_look_by_hand() -> None:
    # One hit in all, and it is ours, of 1 and 3 requests. Null: it falls on ours with 1/4; odds 3: with 3/(3+3) = 1/2.
    assert odds_evidence(1, 1, 0, 3, 3.0) == pytest.approx(math.log(2))
    assert odds_evidence(0, 1, 1, 3, 3.0) == pytest.approx(math.log((1 / 2) / (3 / 4)))
    assert odds_evidence(0, 100, 0, 300, 3.0) == 0.0
    assert share_evidence(2, 0, 0.25, 3.0) == pytest.approx(2 * math.log(2))
    assert rate_evidence(0, 1, 0.01, 0.03) == pytest.approx(math.log(0.99 / 0.97))
    assert rate_evidence(1, 1, 0.01, 0.03) == pytest.approx(math.log(1 / 3))
    assert mixture([math.log(2), math.log(4)]) == pytest.approx(math.log(3))


def test_counts_of_millions_are_summed_at_once_and_agree_with_the_normal_limit() -> None:
    # Where counts are large the likelihood ratio of odds near 1 is that of a normal: score * log odds - variance / 2.
    size, hits = 1_000_000, 20_000
    log_odds = 0.01
    variance = hits * 0.25 * (1 - hits / (2 * size))
    for ours in (10_000, 10_050):
        expected = (ours - hits / 2) * log_odds - variance * log_odds**2 / 2
        assert odds_evidence(ours, size, hits - ours, size, math.exp(log_odds)) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_restarts_at_equal_rates_give_one(share: float) -> None:
    for count in (1, 4):
        mean = sum(
            math.comb(count, ours)
            * share**ours
            * (1 - share) ** (count - ours)
            * math.exp(share_evidence(ours, count - ours, share, 5.0))
            for ours in range(count + 1)
        )
        assert mean == pytest.approx(1.0)


def test_the_evidence_of_a_mean_is_one_in_expectation_over_a_normal_score() -> None:
    """By numerical integration over the score, which is normal where the means are equal."""
    for size in (50.0, 500.0):
        width = 0.001
        scores = [width * step for step in range(-40_000, 40_000)]
        logs = [mean_evidence(score, 1.0, size, 50.0) - score * score / 2 for score in scores]
        mean = sum(math.exp(log) for log in logs) * width / math.sqrt(2 * math.pi)
        assert mean == pytest.approx(1.0, abs=5e-3)
