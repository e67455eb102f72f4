"""The journal of decisions: bounded, newest first, and quiet when nothing new was decided."""

from __future__ import annotations

from millstream_operator.diagnosis.decisions import LIMIT, Decision, journal

NOON, LATER = "2026-01-01T12:00:00Z", "2026-01-01T13:00:00Z"


def test_the_newest_decision_comes_first() -> None:
    before = journal([], [Decision("PlanAdopted", "two GPUs")], NOON)

    after = journal(before, [Decision("RolledBack", "the new pod crashed")], LATER)

    assert [(entry["time"], entry["type"]) for entry in after] == [(LATER, "RolledBack"), (NOON, "PlanAdopted")]


def test_a_decision_that_stands_is_written_once() -> None:
    once = journal([], [Decision("Draining", "no spare GPU")], NOON)

    assert journal(once, [Decision("Draining", "no spare GPU")], LATER) == once


def test_the_same_words_are_news_again_after_others_of_their_type() -> None:
    entries = journal([], [Decision("Scaled", "to 2")], NOON)
    entries = journal(entries, [Decision("Scaled", "to 1")], NOON)

    assert [entry["message"] for entry in journal(entries, [Decision("Scaled", "to 2")], LATER)] == [
        "to 2",
        "to 1",
        "to 2",
    ]


def test_the_oldest_entries_go() -> None:
    entries: list[dict[str, str]] = []
    for number in range(LIMIT + 5):
        entries = journal(entries, [Decision("Scaled", f"to {number}")], NOON)

    assert len(entries) == LIMIT
    assert entries[-1]["message"] == "to 5"
