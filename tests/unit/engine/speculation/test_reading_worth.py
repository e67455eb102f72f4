"""A draft model leaves a prompt alone that takes longer to read than the answer takes without drafts."""

from __future__ import annotations

from millstream_runtime.engine.speculation.reading_worth import ReadingWorth


def test_until_an_answer_has_ended_all_tokens_that_may_come_are_expected() -> None:
    assert ReadingWorth().expected_tokens(7, 100) == 100


def test_an_answer_is_expected_to_be_as_long_as_those_before_it_and_no_longer_than_it_may() -> None:
    worth = ReadingWorth()
    for _ in range(60):
        worth.observe_answer(400)
    for _ in range(60):
        worth.observe_answer(40)
    assert round(worth.expected_tokens(0, 1000)) == 41
    assert worth.expected_tokens(0, 10) == 10
    assert round(worth.expected_tokens(30, 1000)) == 30, "one that is longer than most goes on"
    assert worth.expected_tokens(300, 1000) == 300


def test_a_long_prompt_with_short_answers_is_not_read_and_a_short_one_is() -> None:
    worth = ReadingWorth()
    worth.observe_answer(40)
    assert worth.may_pay(0.079, 0.002, 0, 1000)
    assert not worth.may_pay(0.081, 0.002, 0, 1000)
    assert worth.may_pay(0.0, 0.0, 0, 1000), "there is nothing left to read"
