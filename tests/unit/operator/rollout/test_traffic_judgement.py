"""New pods are worse where a difference is beyond chance, and never for a few requests."""

from __future__ import annotations

import pytest

from millstream_operator.rollout.traffic_shift.traffic_judgement import Side, in_words, why_worse
from millstream_operator.workloads.traffic import NO_TRAFFIC, Traffic, total


def side(stop: int = 0, length: int = 0, error: int = 0, *, itl_seconds: float = 0.05, **counts: int) -> Side:
    tokens = 20 * (stop + length)
    traffic = Traffic(stop, length, error, tokens, tokens * itl_seconds)
    return Side(traffic, traffic, read=1, **counts)


@pytest.mark.parametrize(
    ("new", "old", "words"),
    [
        (side(50), side(500), None),
        (side(0), side(500), None),
        (side(47, error=3), side(100), None),  # 3 of 50: more than one rollout in a thousand would show it
        (side(40, error=10), side(500), "10 of 50 of its requests ended with an error, of the old pods' 0 of 500"),
        (side(0, error=6), side(500), "6 of 6"),  # few, but never by chance
        (side(40, error=10), side(400, error=100), None),  # the old pods fail as often
        (side(10, 40), side(450, 50), "40 of 50 of its answers ended at their limit of tokens"),
        (side(50, 0), side(250, 250), "0 of 50 of its answers"),  # they end too early
        (side(40, 10), side(450, 50), None),  # a tenth more is no failure
        (side(50, itl_seconds=0.2), side(50), None),  # four times: what a format may cost on a CPU
        (side(50, itl_seconds=0.26), side(50), "its tokens come every 260 ms, those of the old pods every 50 ms"),
        (side(5, itl_seconds=0.5), side(50), None),  # too few tokens to say
        (side(50, restarts=1), side(50), "began anew 1 times"),
        (side(50, restarts=1), side(50, restarts=1), None),
    ],
)
def test_what_is_worse(new: Side, old: Side, words: str | None) -> None:
    found = why_worse(new, old)
    assert (found is None) if words is None else (words in (found or "")), found


def test_an_objective_decides_about_the_latency_where_there_is_one() -> None:
    slow, old = side(50, itl_seconds=0.09), side(50, itl_seconds=0.01)
    assert why_worse(slow, old, objective_seconds=0.1) is None, "nine times as slow, as promised"
    assert "objectives.itl is 80 ms" in (why_worse(slow, old, objective_seconds=0.08) or "")
    assert why_worse(slow, side(50, itl_seconds=0.085), objective_seconds=0.08) is None, "the old pods broke it, too"


def test_counters_of_millions_are_judged_at_once() -> None:
    many = Traffic(stop=2_000_000, error=2_000)
    assert why_worse(Side(many), Side(many)) is None
    assert why_worse(Side(Traffic(stop=2_000_000, error=2_600)), Side(many)) is not None


def test_traffic_is_added_and_a_process_that_began_anew_counts_from_zero() -> None:
    before, now = Traffic(5, 1, 0, 60, 3.0), Traffic(7, 1, 1, 90, 4.5)
    assert now.since(before) == Traffic(2, 0, 1, 30, 1.5)
    assert Traffic(2).since(before) == Traffic(2)
    assert total([now, before]) == Traffic(12, 2, 1, 150, 7.5)
    assert total([]) == NO_TRAFFIC


@pytest.mark.parametrize(
    ("new", "old", "words"),
    [
        (Side(), side(5), "could not be read, so nothing was compared"),
        (side(), side(5), "no request ended in its pods"),
        (side(60), side(90, error=1), "errors in 0 of 60 of its requests, in 1 of 91 of the old pods', mean time"),
    ],
)
def test_the_journal_says_what_was_compared(new: Side, old: Side, words: str) -> None:
    assert words in in_words(new, old)
