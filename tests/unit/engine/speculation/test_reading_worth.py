"""A draft model reads a prompt where its drafts are expected to save what that takes."""

from __future__ import annotations

from millstream_runtime.engine.speculation.reading_worth import AnswerLengths, Reading, worth_reading


def test_until_an_answer_has_ended_all_tokens_that_may_come_are_expected() -> None:
    assert AnswerLengths().expected_tokens(7, 100) == 100


def test_an_answer_is_expected_to_be_as_long_as_those_before_it_and_no_longer_than_it_may() -> None:
    lengths = AnswerLengths()
    for _ in range(60):
        lengths.observe_answer(400)
    for _ in range(60):
        lengths.observe_answer(40)
    assert round(lengths.expected_tokens(0, 1000)) == 41
    assert lengths.expected_tokens(0, 10) == 10
    assert round(lengths.expected_tokens(30, 1000)) == 30, "one that is longer than most goes on"
    assert lengths.expected_tokens(300, 1000) == 300


def test_a_long_prompt_with_a_short_answer_is_not_read_and_a_short_one_is() -> None:
    assert worth_reading({"a": Reading(0.079, 40)}, 0.002) == {"a"}
    assert not worth_reading({"a": Reading(0.081, 40)}, 0.002)
    assert worth_reading({"a": Reading(0.0, 0)}, 0.0) == {"a"}, "there is nothing left to read"
    assert not worth_reading({"a": Reading(0.01, 40)}, -0.001)


def test_what_some_save_is_spent_on_others_so_that_a_batch_drafts_as_a_whole() -> None:
    unread = {"long": Reading(0.13, 40), "short": Reading(0.01, 40), "longest": Reading(0.9, 40)}
    assert worth_reading(unread, 0.002) == {"short", "long"}
    assert worth_reading({"long": unread["long"]}, 0.002) == set()
