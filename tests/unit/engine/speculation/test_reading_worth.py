"""A draft model reads a prompt where its drafts are expected to save what that takes."""

from __future__ import annotations

import math

from millstream_runtime.engine.speculation.reading_worth import (
    AnswerLengths,
    Reading,
    ReadingPrice,
    before_the_end,
    worth_drafting,
    worth_reading,
)


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
    assert worth_reading({"a": Reading(0.072, 40)}, 0.002) == {"a"}
    assert not worth_reading({"a": Reading(0.074, 40)}, 0.002), "0.08 s less what comes while it is read"
    assert worth_reading({"a": Reading(0.0, 0)}, 0.0) == {"a"}, "there is nothing left to read"
    assert not worth_reading({"a": Reading(0.01, 40)}, -0.001)


def test_what_some_save_is_spent_on_others_so_that_a_batch_drafts_as_a_whole() -> None:
    unread = {"long": Reading(0.13, 40), "short": Reading(0.01, 40), "longest": Reading(0.9, 40)}
    assert worth_reading(unread, 0.002) == {"short", "long"}
    assert worth_reading({"long": unread["long"]}, 0.002) == set()


def test_those_that_are_read_last_have_had_tokens_without_drafts_until_then() -> None:
    three = {name: Reading(0.04, 40) for name in "abc"}  # two steps each
    assert worth_reading(three, 0.0013) == {"a", "b", "c"}
    assert worth_reading(three, 0.0011) == {"a", "b"}
    assert worth_reading(three, 0.0010) == set()


def test_drafts_behind_the_end_of_an_answer_give_nothing() -> None:
    assert before_the_end([0.8, 0.5], math.inf) == [0.8, 0.5]
    assert before_the_end([0.8, 0.4], 2.0) == [0.4, 0.1]
    assert before_the_end([1.0, 1.0], 0.0) == [0.0, 0.0]


def test_the_price_of_reading_is_that_of_the_requests_of_late_each_counted_once() -> None:
    price = ReadingPrice()
    assert price.seconds_per_token == 0
    for _ in range(50):  # steps in which the same request is still there
        price.observe({"first": Reading(0.04, 40)}, 0.002)
    assert price.seconds_per_token == 0.001
    for request in range(60):
        price.observe({request: Reading(0.02, 40)}, 0.002)
    assert 0.0005 <= price.seconds_per_token < 0.000502


def test_a_request_that_is_never_read_has_no_part_in_the_price() -> None:
    price = ReadingPrice()
    price.observe({"short": Reading(0.04, 40), "as long as its answer": Reading(0.9, 40)}, 0.002)
    assert price.seconds_per_token == 0.001


def test_one_that_has_ended_counts_again_where_its_name_returns() -> None:
    price = ReadingPrice()
    price.observe({"a": Reading(0.04, 40)}, 0.002)
    price.forget("a")
    price.observe({"a": Reading(0.0, 40)}, 0.002)
    assert price.seconds_per_token < 0.0005


def test_requests_that_would_lose_by_drafts_are_left_out_until_the_rest_gains() -> None:
    marginals = {"cheap": [0.9, 0.8], "dear": [0.9, 0.8]}
    seconds = [0.010 + 0.001 * drafts for drafts in range(5)]
    both = worth_drafting(marginals, 2, seconds, {"cheap": Reading(0.0, 90), "dear": Reading(0.0, 90)})
    assert both == marginals
    kept = worth_drafting(marginals, 2, seconds, {"cheap": Reading(0.01, 90), "dear": Reading(9.0, 90)})
    assert kept == {"cheap": marginals["cheap"]}
    none = worth_drafting(marginals, 2, seconds, {"cheap": Reading(9.0, 90), "dear": Reading(9.0, 90)})
    assert none == {}
