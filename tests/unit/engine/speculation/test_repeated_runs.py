"""The longest run at the end of a text that stood in it before, and where."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_runtime.engine.speculation.repeated_runs import (
    MOST_PLACES,
    MOST_RUN_TOKENS,
    NO_MATCH,
    PAIR_TOKENS,
    Match,
    RepeatedRuns,
)

TEXTS = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), max_size=32))


def searched(text: list[int], first: int = 0) -> int:
    """The tokens of the longest run, by looking through the whole text."""
    for num_tokens in range(len(text) - 1 - first, PAIR_TOKENS - 1, -1):
        for end in range(first + num_tokens, len(text)):
            if text[end - num_tokens : end] == text[-num_tokens:]:
                return num_tokens
    return 0


def match_of(text: list[int], first: int = 0) -> Match:
    runs = RepeatedRuns(first)
    runs.read(text, len(text))
    return runs.match(text)


def test_the_longest_run_and_its_latest_place() -> None:
    text = [1, 2, 3, 9, 1, 2, 3, 8, 7, 2, 3]
    runs = RepeatedRuns()
    runs.read(text, len(text))
    assert runs.match(text) == Match(2, 7)  # 2, 3 stood at 1 and at 5
    assert runs.match(text) == Match(2, 7)
    text += [9, 1]
    runs.read(text, len(text))
    assert runs.match(text) == Match(4, 5)  # 2, 3, 9, 1


def test_a_single_token_that_came_before_is_no_run() -> None:
    for text in ([], [1], [1, 1], [1, 2], [1, 2, 1], [1, 2, 3, 1]):
        assert match_of(text) == NO_MATCH
    assert match_of([1, 2, 1, 2]) == Match(2, 2)
    assert match_of([1, 1, 1]) == Match(2, 2)


@settings(max_examples=60)
@given(TEXTS, st.integers(0, 5), st.randoms(use_true_random=False))
def test_a_text_that_grows_has_the_run_that_a_search_finds(text: list[int], first: int, rng: random.Random) -> None:
    runs, known = RepeatedRuns(first), 0
    while known < len(text):
        known = min(len(text), known + rng.randint(1, 4))
        runs.read(text, known)
        if rng.random() < 0.5:
            continue  # it need not be asked behind every token
        num_tokens, end = runs.match(text[:known])
        assert min(num_tokens, MOST_RUN_TOKENS) == min(searched(text[:known], first), MOST_RUN_TOKENS)
        assert end < known
        assert text[end - num_tokens : end] == text[known - num_tokens : known] or not num_tokens
        assert end - num_tokens >= first or not num_tokens, "no run has a token that was not read"


@settings(max_examples=40)
@given(TEXTS, st.integers(1, 8))
def test_in_pieces_or_token_by_token_it_is_the_same(text: list[int], piece_tokens: int) -> None:
    in_pieces, one_by_one = RepeatedRuns(), RepeatedRuns()
    for stop in range(piece_tokens, len(text) + piece_tokens, piece_tokens):
        in_pieces.read(text, min(stop, len(text)))
    for stop in range(1, len(text) + 1):
        one_by_one.read(text, stop)
    assert in_pieces.match(text) == one_by_one.match(text)
    assert in_pieces.num_tokens == one_by_one.num_tokens == len(text)


def test_a_run_that_goes_on_is_known_however_long_it_is() -> None:
    text = [*range(100), 500, *range(100)]
    runs = RepeatedRuns()
    for known in range(1, len(text) + 1):
        runs.read(text, known)
        found = runs.match(text[:known])
    assert found == Match(100, 100)


def test_of_a_pair_with_very_many_places_the_latest_are_compared() -> None:
    """The longest run is behind them, so it is missed; what is found is right all the same."""
    text = [7, 8, 9, 1, 2, *(token for place in range(MOST_PLACES) for token in (100 + place, 1, 2)), 7, 8, 9, 1, 2]
    num_tokens, end = match_of(text)
    assert (num_tokens, text[end - 2 : end]) == (2, [1, 2])
    assert match_of([*text[:-1]]) == Match(4, 4), "the pair before it stood once"


def test_texts_that_repeat_without_end_are_read_in_one_look() -> None:
    for text in ([5] * 3000, [1, 2] * 1500):
        assert match_of(text).num_tokens == MOST_RUN_TOKENS
