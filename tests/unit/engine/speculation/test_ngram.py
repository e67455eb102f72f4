"""Drafts from the request itself: what followed its longest run that came before."""

from __future__ import annotations

import pytest

from millstream_runtime.engine.request import Request
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation import ngram
from millstream_runtime.engine.speculation.ngram import NGramDrafter
from millstream_runtime.engine.speculation.skip import Skip
from tests.support.drafting_engines import N_GRAMS, counts
from tests.support.engines import MakeEngine, WriteModel, generate, greedy


def sequence(token_ids: list[int], name: str = "0") -> Sequence:
    return Sequence(Request(name, token_ids, greedy(64)), 0, 0, [*token_ids], len(token_ids))


def test_the_longest_run_decides_between_places() -> None:
    """The last three tokens stood behind 1 and, later, behind 5; behind 1 they are part of a longer run."""
    one = sequence([1, 2, 3, 4, 6, 7, 8, 5, 2, 3, 4, 9, 1, 2, 3, 4])
    assert NGramDrafter().propose({one: 4}) == {one: [6, 7, 8, 5]}


@pytest.mark.parametrize(("most", "expected"), [(1, [6]), (4, [6, 7, 8]), (16, [6, 7, 8])])
def test_a_run_has_as_many_drafts_as_it_is_long(most: int, expected: list[int]) -> None:
    one = sequence([1, 2, 3, 6, 7, 8, 9, 5, 1, 2, 3])
    assert NGramDrafter().propose({one: most}) == {one: expected}


def test_a_single_token_that_came_before_has_no_drafts() -> None:
    one, two = sequence([1, 2, 3, 1]), sequence([1, 2, 3, 1, 2])
    assert NGramDrafter().propose({one: 4, two: 4}) == {one: (), two: [3, 1]}


def test_drafts_go_on_with_themselves() -> None:
    one = sequence([7, 1, 2, 1, 2, 1, 2])
    assert NGramDrafter().propose({one: 4}) == {one: [1, 2, 1, 2]}


def test_a_long_prompt_is_read_over_several_steps_while_others_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "STEP_TOKENS", 100)
    long, short, drafter = sequence([*range(110), *range(100)]), sequence([1, 2, 3, 1, 2]), NGramDrafter()
    for _ in range(2):
        assert drafter.propose({long: 2, short: 2}) == {long: Skip.CATCHING_UP, short: [3, 1]}
        assert drafter.has_read_prompts
    assert drafter.propose({long: 2, short: 2}) == {long: [100, 101], short: [3, 1]}
    assert not drafter.has_read_prompts
    long.append(100)
    assert drafter.propose({long: 2}) == {long: [101, 102]}


def test_of_a_request_for_which_there_is_no_room_the_last_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "LEAST_REQUEST_TOKENS", 8)
    known = [1, 2, 3, 4, 6, 7, 8, 5, 2, 3, 4, 9, 1, 2, 3, 4]
    by_all, by_the_last = [6, 7], [9, 1]  # behind 1, 2, 3, 4 and behind 2, 3, 4
    one, two, three = (sequence(known, name) for name in "abc")
    assert NGramDrafter(most_request_tokens=9).propose({one: 2}) == {one: by_the_last}
    drafter = NGramDrafter(most_tokens=2 * len(known))
    assert drafter.propose({one: 2, two: 2, three: 2}) == {one: by_all, two: by_all, three: by_the_last}
    drafter.forget(one)
    assert drafter.propose({two: 2, three: 2}) == {two: by_all, three: by_the_last}, "a request keeps what it has"
    four = sequence(known, "d")
    assert drafter.propose({four: 2}) == {four: by_the_last}, "what the others left"
    for one in (two, three, four):
        drafter.forget(one)
    assert drafter._num_tokens == 0
    assert [*drafter.propose({sequence(known, "e"): 2}).values()] == [by_all]


def test_a_request_that_repeats_takes_fewer_steps(write_model: WriteModel, make_engine: MakeEngine) -> None:
    request = Request("0", [9, 6, 7], greedy(120, logit_bias=((5, 1000.0),)))
    expected = generate(make_engine(write_model()), [request])["0"]
    engine = make_engine(write_model(), **N_GRAMS, max_draft_tokens=6)
    assert generate(engine, [request])["0"] == expected
    found = counts(engine)
    assert len(found.accepted_per_position) == 6
    assert found.num_accepted_tokens > 90
    assert engine.stats().steps_total == 120 - found.num_accepted_tokens
