"""Figures from which drafts stand: against a decoder that drafts and checks."""

from __future__ import annotations

import numpy as np
import pytest

from millstream_runtime.tune_draft.acceptance import Stands, acceptance, accepted_and_checks, gain


def stands(before: str, after: str, *, is_answer: bool = True) -> Stands:
    """`+` stands."""
    return Stands("all", False, is_answer, *(np.array([one == "+" for one in text]) for text in (before, after)))


@pytest.mark.parametrize(
    ("text", "accepted", "checks"),
    [
        ("-", 0, 1),
        ("+", 1, 1),
        ("++-", 2, 1),
        ("+++", 2, 1),
        ("++++", 3, 2),
        ("+++++", 4, 2),
        ("-+-", 1, 2),
        ("--++-+", 3, 4),
    ],
)
def test_a_check_accepts_up_to_the_first_that_differs_and_gives_one_more(text: str, accepted: int, checks: int) -> None:
    assert accepted_and_checks(stands(text, text).before, 2) == (accepted, checks)


def test_answers_and_texts_are_apart() -> None:
    found = [stands("+-", "++"), stands("--", "+-"), stands("----", "+---", is_answer=False)]
    before, after = (acceptance(found, 5, after=after) for after in (False, True))
    assert (before.percent, after.percent) == (25, 75)
    assert (before.text_percent, after.text_percent) == (0, 25)
    assert (before.accepted_tokens_per_check, after.accepted_tokens_per_check) == (1 / 3, 3 / 2)


def test_the_gain_has_an_interval_over_answers() -> None:
    found = gain([stands("--", "++")] * 10 + [stands("--", "--")] * 10, seed=0)
    assert found.value == 50
    assert 20 < found.low < 50 < found.high < 80
    assert gain([stands("--", "++")] * 3, seed=0).low == 100
