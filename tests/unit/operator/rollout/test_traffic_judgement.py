"""New pods are worse where the evidence is enough, and a stage ends where the opposite evidence is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from millstream_operator.rollout.traffic_shift.evidence import Evidence, PodCounters, Reading, look, stage_begins
from millstream_operator.rollout.traffic_shift.traffic_judgement import (
    AT_LIMIT_ALPHA,
    ERRORS_ALPHA,
    RESTARTS_ALPHA,
    TOKEN_TIME_ALPHA,
    Limits,
    are_alike,
    in_words,
    needs,
    why_worse,
)
from millstream_operator.workloads.traffic import Histogram, Traffic

INFINITE = math.inf
TIME_EDGES = (0.025, 0.05, 0.1, 0.2, INFINITE)
PROMPTS = Histogram((100.0, 1000.0, INFINITE), (1, 0, 0))
LONG_PROMPTS = Histogram((100.0, 1000.0, INFINITE), (0, 1, 0))
DEFAULT = Limits()


def times(count: int, seconds: float) -> Histogram:
    index = next(index for index, edge in enumerate(TIME_EDGES) if seconds <= edge)
    return Histogram(TIME_EDGES, tuple(count if index == bucket else 0 for bucket in range(len(TIME_EDGES))))


def traffic(
    stop: int = 0, length: int = 0, error: int = 0, seconds: float = 0.03, prompts: Histogram = PROMPTS
) -> Traffic:
    complete = stop + length
    lengths = Histogram(prompts.edges, tuple(complete * count for count in prompts.counts))
    limits = Histogram(PROMPTS.edges, tuple(complete * count for count in PROMPTS.counts))
    return Traffic(stop, length, error, times(complete, seconds), complete * seconds, lengths, limits)


def after(new: Traffic, old: Traffic, looks: int = 1) -> Evidence:
    """The evidence after so many looks, in each of which the pods answered the same."""
    evidence = stage_begins(Evidence(), 25)
    seen = {"new": Traffic(), "old": Traffic()}
    evidence = look(evidence, *(Reading({uid}, {uid: PodCounters(seen[uid])}) for uid in ("new", "old")))
    for _ in range(looks):
        seen = {"new": seen["new"].plus(new), "old": seen["old"].plus(old)}
        evidence = look(evidence, *(Reading({uid}, {uid: PodCounters(seen[uid])}) for uid in ("new", "old")))
    return evidence


@pytest.mark.parametrize(
    ("new", "old", "words"),
    [
        (traffic(50), traffic(500), None),
        (traffic(), traffic(500), None),
        (traffic(49, error=1), traffic(100), None),
        (
            traffic(40, error=10),
            traffic(500),
            "10 of 50 of its requests ended with an error, of the old pods' 0 of 500",
        ),
        (traffic(40, error=10), traffic(400, error=100), None),
        (traffic(500), traffic(450, error=50), None),
        (traffic(10, 40), traffic(450, 50), "40 of 50 of its answers ended at their limit of tokens"),
        (traffic(10, 40, prompts=LONG_PROMPTS), traffic(450, 50), None),
        (traffic(50, 0), traffic(250, 250), None),
        (traffic(400, 100), traffic(450, 50), None),
        (traffic(200, seconds=0.055), traffic(200), None),
        (traffic(200, seconds=0.09), traffic(200), "its time per token is 90 ms, that of the old pods 30 ms"),
        (traffic(20, seconds=0.09), traffic(200), None),
    ],
    ids=[
        "alike",
        "no requests",
        "one error may be chance",
        "more errors",
        "the old pods fail as often",
        "fewer errors",
        "more at the limit",
        "other prompts have other answers",
        "fewer at the limit",
        "a tenth more at the limit",
        "not twice as slow",
        "three times as slow",
        "too few answers",
    ],
)
def test_what_is_worse(new: Traffic, old: Traffic, words: str | None) -> None:
    found = why_worse(after(new, old), DEFAULT)
    assert (found is None) if words is None else (words in (found or "")), found


def test_the_budget_of_false_rollbacks_is_one_percent_in_all() -> None:
    assert sum((ERRORS_ALPHA, RESTARTS_ALPHA, AT_LIMIT_ALPHA, TOKEN_TIME_ALPHA)) == pytest.approx(0.01)


def test_errors_that_all_pods_have_at_one_time_are_no_evidence() -> None:
    """An hour of trouble for all, while the new pods had most of the requests, looks worse in the sums."""
    calm = after(traffic(100), traffic(900))
    trouble = after(traffic(450, error=450), traffic(50, error=50))
    both = replace(
        trouble,
        new=calm.new.plus(trouble.new),
        old=calm.old.plus(trouble.old),
        errors=tuple(map(sum, zip(calm.errors, trouble.errors, strict=True))),
    )
    assert both.new.error / both.new.finished > 8 * both.old.error / both.old.finished
    assert why_worse(both, DEFAULT) is None


def test_an_objective_wins_over_the_old_pods_times() -> None:
    slow = traffic(400, seconds=0.09)
    assert why_worse(after(slow, traffic(400, seconds=0.01)), Limits(objective_seconds=0.2)) is None
    words = why_worse(after(slow, traffic(400, seconds=0.03)), Limits(objective_seconds=0.06))
    assert "objectives.itl is 60 ms" in (words or "")
    broken = after(slow, traffic(400, seconds=0.085))
    assert why_worse(broken, Limits(objective_seconds=0.06)) is None, "the old pods break it, too"
    assert needs(broken, Limits(objective_seconds=0.06)).are_met


def test_what_the_plans_allow_is_no_fault() -> None:
    slow = after(traffic(300, seconds=0.09), traffic(300))
    assert why_worse(slow, Limits(factor=8.0)) is None
    assert needs(slow, Limits(factor=8.0)).are_met


@pytest.mark.parametrize(
    ("new", "old", "missing"),
    [
        (traffic(260), traffic(500), ()),
        (traffic(200), traffic(500), ("more requests, to tell its errors",)),
        (traffic(260), traffic(20), ("50 answers of two tokens or more on both sides, to compare their times",)),
        (replace(traffic(260), token_times=Histogram()), traffic(500), ()),
        (traffic(260), replace(traffic(500), token_times=Histogram()), ()),
        (traffic(5000, error=500), traffic(5000, error=500), ()),
        (traffic(490, error=10), traffic(500), ("more requests, to tell its errors",)),
        (traffic(260, seconds=0.059), traffic(260), ("more answers, to tell its time per token from the limit",)),
    ],
    ids=[
        "no errors",
        "too few requests",
        "too few old answers",
        "answers of one token",
        "old pods without the histogram",
        "one request in eleven fails on both sides",
        "2 % of errors",
        "near the limit",
    ],
)
def test_a_stage_ends_with_the_evidence_that_it_needs(new: Traffic, old: Traffic, missing: tuple[str, ...]) -> None:
    assert needs(after(new, old), DEFAULT).missing == missing


def test_the_number_of_requests_that_is_needed() -> None:
    # Without errors each request gives log(0.9995 / 0.97) = 0.02996: (log(400) + log(4)) / 0.02996 = 246.2.
    assert needs(after(traffic(10), traffic(10)), DEFAULT).needed == 247
    # With 1 %: 0.01 log(1/3) + 0.99 log(0.99/0.97) = 0.009218: 7.378 / 0.009218 = 800.4.
    assert needs(after(traffic(99, error=1), traffic(10)), DEFAULT).needed == 801
    assert needs(after(traffic(95, error=5), traffic(10)), DEFAULT).needed is None


def test_prompts_are_alike_where_their_distributions_are() -> None:
    assert are_alike(traffic(100), traffic(900))
    assert not are_alike(traffic(100, prompts=LONG_PROMPTS), traffic(900))
    mixed = traffic(500).plus(traffic(20, prompts=LONG_PROMPTS))
    assert are_alike(mixed, traffic(900)), "4 % other prompts"
    assert not are_alike(Traffic(stop=100), traffic(900)), "they do not report them"


def test_a_process_that_began_anew_counts_from_zero() -> None:
    before, now = traffic(5, 1), traffic(7, 1, 1)
    part = now.since(before)
    assert part.token_times_seconds == pytest.approx(2 * 0.03)
    assert replace(part, token_times_seconds=0.0) == replace(traffic(2, 0, 1), token_times_seconds=0.0)
    assert traffic(2).since(before) == traffic(2)
    again = replace(traffic(50), started_at_seconds=9.0)
    assert again.since(replace(before, started_at_seconds=3.0)) == again, "more than before, and another process"
    assert now.plus(before).finished == 15


def test_the_bound_of_squares_holds_for_any_values_and_is_reached() -> None:
    """Values in the buckets (0, 1], (1, 2], (2, inf) that add up to the same sum; by hand where they are extreme."""
    histogram = Histogram((1.0, 2.0, INFINITE), (2, 3, 1))
    for values in ([0.5, 0.5, 1.5, 1.5, 1.5, 4.0], [0.1, 1.0, 1.1, 2.0, 1.3, 4.0], [1e-9, 1e-9, 1.1, 1.1, 1.1, 6.2]):
        assert sum(value * value for value in values) <= histogram.most_squares(sum(values)) + 1e-9
    assert Histogram((1.0, 2.0), (0, 4)).most_squares(6.0) == pytest.approx(2 * 1 + 2 * 4), "half at each end"


@pytest.mark.parametrize(
    ("new", "old", "words"),
    [
        (traffic(), traffic(5), "no request ended in its pods that could be read, so nothing was compared"),
        (
            traffic(60),
            traffic(90, error=1),
            "errors in 0 of 60 of its requests, in 1 of 91 of the old pods', mean time",
        ),
        (replace(traffic(60), token_times=Histogram()), traffic(90), "its times per token were not compared"),
    ],
)
def test_the_journal_says_what_was_compared(new: Traffic, old: Traffic, words: str) -> None:
    assert words in in_words(after(new, old))
