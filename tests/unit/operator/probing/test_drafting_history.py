"""What is made of the pods' counts of drafts: a state that changes seldom, and an acceptance that is worth a write."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from millstream_operator.api.status import MOST_FAILED_PODS
from millstream_operator.probing.drafting_history import (
    LEAST_SECONDS_BETWEEN_CHANGES,
    Drafting,
    DraftingHistory,
    SpeculationCounts,
    read_speculation_counts,
)

MINUTE = 60.0


def grew(checks: int = 0, without_gain: int = 0, accepted: int = 0, drafter_failed: int = 0) -> SpeculationCounts:
    """Four drafts per check."""
    return SpeculationCounts(checks, 4 * checks, accepted, without_gain, drafter_failed)


def minutes(history: DraftingHistory, growth: SpeculationCounts, count: int, start: float = 0.0) -> list[float]:
    """Add the same growth every minute; return the minutes in which the state changed."""
    changed = []
    for minute in range(count):
        was = history.drafting
        if history.add(growth, start + minute * MINUTE):
            assert history.drafting != was
            if was is not None and history.drafting is not None and history.drafting.is_drafting != was.is_drafting:
                changed.append(start / MINUTE + minute)
    return changed


def test_a_lasting_change_is_seen_within_minutes_and_once() -> None:
    history = DraftingHistory()
    assert minutes(history, grew(checks=300, accepted=600), 20) == []
    assert history.drafting == Drafting(is_drafting=True, accepted_percent=50)
    (stopped,) = minutes(history, grew(checks=3, without_gain=300), 20, start=20 * MINUTE)
    assert 22 <= stopped <= 26
    assert history.drafting is not None
    assert not history.drafting.is_drafting
    (again,) = minutes(history, grew(checks=300, accepted=600), 20, start=40 * MINUTE)
    assert 42 <= again <= 46


@pytest.mark.parametrize("seed", range(4))
def test_pods_that_flip_at_random_change_the_state_at_most_once_in_ten_minutes(seed: int) -> None:
    pods, chance, changed = [True] * 3, random.Random(seed), list[float]()
    history = DraftingHistory(Drafting(is_drafting=True))
    for second in range(0, 6 * 3600, 20):
        pods = [one if chance.random() < 0.7 else not one for one in pods]
        drafts = pods[second // 20 % 3]
        was = history.drafting
        history.add(grew(checks=200, accepted=300) if drafts else grew(without_gain=200), float(second))
        assert was is not None
        assert history.drafting is not None
        if was.is_drafting != history.drafting.is_drafting:
            changed.append(second)
    gaps = [after - before for before, after in itertools.pairwise(changed)]
    assert all(gap >= LEAST_SECONDS_BETWEEN_CHANGES for gap in gaps)


def test_a_change_that_the_status_has_holds_back_the_next_one() -> None:
    """The operator was restarted two minutes after it wrote that drafting stopped."""
    history = DraftingHistory(Drafting(is_drafting=False), changed_at=-2 * MINUTE)
    (changed,) = minutes(history, grew(checks=300, accepted=600), 20)
    assert changed == 8


def test_a_few_decodes_and_none_say_nothing() -> None:
    history = DraftingHistory()
    assert minutes(history, grew(without_gain=2), 60) == []
    assert history.drafting is None
    assert not history.add(grew(), 0.0)
    known = DraftingHistory(Drafting(is_drafting=True, accepted_percent=40))
    assert not any(known.add(grew(), minute * MINUTE) for minute in range(60))


def test_an_acceptance_is_news_when_it_moves_by_ten_points() -> None:
    history = DraftingHistory()
    assert history.add(grew(checks=500, accepted=1000), 0.0)
    assert not history.add(grew(checks=500, accepted=1080), MINUTE)
    assert [history.add(grew(checks=500, accepted=1900), (2 + minute) * MINUTE) for minute in range(3)].count(True) >= 1
    assert history.drafting is not None
    assert history.drafting.accepted_percent is not None
    assert history.drafting.accepted_percent >= 60


def test_a_failed_drafter_is_named() -> None:
    history = DraftingHistory(Drafting(is_drafting=True))
    minutes(history, grew(drafter_failed=100), 20)
    assert history.drafting == Drafting(is_drafting=False, has_failed=True)


def test_pods_whose_drafter_failed_are_kept_whatever_the_share() -> None:
    history = DraftingHistory()
    assert history.set_failed("b", has_failed=True)
    assert history.drafting == Drafting(is_drafting=True, failed_pods=("b",)), "before anything else is known"
    assert not history.set_failed("b", has_failed=True)
    assert not history.set_failed("a", has_failed=False)
    assert history.set_failed("a", has_failed=True)
    minutes(history, grew(checks=300, accepted=600), 5)
    assert history.drafting == Drafting(is_drafting=True, accepted_percent=50, failed_pods=("a", "b"))
    assert history.set_failed("a", has_failed=False), "its engine was started anew"
    assert not history.keep_failed({"b", "c"})
    assert history.keep_failed({"c"})
    assert history.drafting == Drafting(is_drafting=True, accepted_percent=50)


def test_a_bounded_number_of_failed_pods_is_named() -> None:
    history = DraftingHistory()
    for number in range(MOST_FAILED_PODS):
        assert history.set_failed(f"pod-{number:02}", has_failed=True)
    assert not history.set_failed("pod-00-again", has_failed=True)
    assert history.set_failed("pod-01", has_failed=False)
    assert history.set_failed("pod-00-again", has_failed=True)


def body(**changed: Any) -> dict[str, Any]:
    counts = {"checks": 5, "draftTokens": 20, "acceptedTokens": 10, "skipped": {"no_gain": 3, "no_proposal": 9}}
    return {"phase": "Ready", "speculation": {"method": "NGram", **counts, **changed}}


def test_the_totals_are_read_and_their_growth() -> None:
    counts = read_speculation_counts(body())
    assert counts == SpeculationCounts(5, 20, 10, 3, 0)
    later = read_speculation_counts(body(checks=7, draftTokens=28))
    assert later is not None
    assert later.since(counts) == SpeculationCounts(2, 8, 0, 0, 0)
    assert counts.since(later) is None, "the engine was started again"


@pytest.mark.parametrize(
    "strange",
    [
        None,
        [],
        {"phase": "Ready"},
        {"speculation": {"method": "NGram", "maxDraftTokens": 4}},  # of a runtime before
        body(checks=-1),
        body(checks=True),
        body(checks=1.5),
        body(checks=1 << 60),
        body(acceptedTokens=21),
        body(skipped={"no_gain": "many"}),
    ],
)
def test_what_is_no_total_is_no_answer(strange: object) -> None:
    assert read_speculation_counts(strange) is None
