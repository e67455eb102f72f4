"""Drafts from the request itself: what followed its longest run that came before, or its last three tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_runtime.engine.request import Request
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation import ngram
from millstream_runtime.engine.speculation.ngram import MATCH_TOKENS, NGramDrafter, NGramIndex
from millstream_runtime.engine.speculation.skip import Skip
from tests.support.drafting_engines import N_GRAMS, counts
from tests.support.engines import MakeEngine, WriteModel, generate, greedy


def drafts(token_ids: list[int], most: int = 4) -> list[int]:
    return NGramIndex().draft(token_ids, most)


def test_what_followed_before_is_proposed() -> None:
    assert drafts([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]) == [4, 5, 6, 7]
    assert drafts([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], most=2) == [4, 5]


def test_the_latest_of_several_places_counts() -> None:
    assert drafts([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3], most=1) == [5]


def test_a_text_that_repeats_goes_on_repeating() -> None:
    assert drafts([7, 1, 2, 1, 2, 1, 2], most=5) == [1, 2, 1, 2, 1]
    assert drafts([7, 7, 7, 7], most=3) == [7, 7, 7]


@pytest.mark.parametrize("token_ids", [[], [1], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 1, 2], [1, 2, 3, 9, 2, 3]])
def test_without_an_earlier_place_there_are_no_drafts(token_ids: list[int]) -> None:
    assert drafts(token_ids) == []


def searched(token_ids: list[int], most: int) -> list[int]:
    """The same by looking through all tokens."""
    last = token_ids[-MATCH_TOKENS:]
    for end in reversed(range(MATCH_TOKENS, len(token_ids))):
        if len(last) == MATCH_TOKENS and token_ids[end - MATCH_TOKENS : end] == last:
            found = [*token_ids]
            for _ in range(most):
                found.append(found[end + len(found) - len(token_ids)])
            return found[len(token_ids) :]
    return []


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 16), st.randoms(use_true_random=False))
def test_an_index_that_grows_finds_what_a_search_finds(tokens: list[int], most: int, rng: random.Random) -> None:
    index, known = NGramIndex(), 0
    while known < len(tokens):
        known = min(len(tokens), known + rng.randint(1, 7))
        assert index.draft(tokens[:known], most) == searched(tokens[:known], most)


def sequence(token_ids: list[int], name: str = "0") -> Sequence:
    return Sequence(Request(name, token_ids, greedy(64)), 0, 0, [*token_ids], len(token_ids))


def test_the_longest_run_decides_between_places() -> None:
    """The last three tokens stood behind 1 and, later, behind 5; behind 1 they are part of a longer run."""
    known = [1, 2, 3, 4, 6, 7, 8, 5, 2, 3, 4, 9, 1, 2, 3, 4]
    assert drafts(known) == [9, 1, 2, 3]
    one = sequence(known)
    assert NGramDrafter().propose({one: 4}) == {one: [6, 7, 8, 5]}


@pytest.mark.parametrize(("most", "expected"), [(1, [6]), (4, [6, 7, 8]), (16, [6, 7, 8])])
def test_a_run_has_as_many_drafts_as_it_is_long(most: int, expected: list[int]) -> None:
    one = sequence([1, 2, 3, 6, 7, 8, 9, 5, 1, 2, 3])
    assert NGramDrafter().propose({one: most}) == {one: expected}


def test_a_single_token_that_came_before_has_no_drafts() -> None:
    one, two = sequence([1, 2, 3, 1]), sequence([1, 2, 3, 1, 2])
    assert NGramDrafter().propose({one: 4, two: 4}) == {one: [], two: [3, 1]}


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


def test_beyond_its_memory_a_request_has_n_grams() -> None:
    """The longest run is that behind 1, the latest three tokens those behind 5."""
    known = [1, 2, 3, 4, 6, 7, 8, 5, 2, 3, 4, 9, 1, 2, 3, 4]
    by_run, by_n_gram = [6, 7], [9, 1]
    one, two, three = (sequence(known, name) for name in "abc")
    assert NGramDrafter(most_request_tokens=15).propose({one: 2}) == {one: by_n_gram}
    drafter = NGramDrafter(most_tokens=2 * len(known))
    assert drafter.propose({one: 2, two: 2, three: 2}) == {one: by_run, two: by_run, three: by_n_gram}
    drafter.forget(one)
    assert drafter.propose({two: 2, three: 2}) == {two: by_run, three: by_n_gram}, "a request keeps what it has"
    four = sequence(known, "d")
    assert drafter.propose({four: 2}) == {four: by_run}
    four.append(5)
    assert drafter.propose({two: 2, four: 2}) == {two: by_run, four: []}, (
        "one token too many: 3, 4, 5 did not come before"
    )


def test_a_request_that_repeats_takes_fewer_steps(write_model: WriteModel, make_engine: MakeEngine) -> None:
    request = Request("0", [9, 6, 7], greedy(120, logit_bias=((5, 1000.0),)))
    expected = generate(make_engine(write_model()), [request])["0"]
    engine = make_engine(write_model(), **N_GRAMS, max_draft_tokens=6)
    assert generate(engine, [request])["0"] == expected
    found = counts(engine)
    assert len(found.accepted_per_position) == 6
    assert found.num_accepted_tokens > 90
    assert engine.stats().steps_total == 120 - found.num_accepted_tokens
