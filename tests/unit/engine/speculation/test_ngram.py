"""N-gram drafts: what followed when the last three tokens came before."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_runtime.config import GovernorMode, SpeculationMethod
from millstream_runtime.engine.request import Request
from millstream_runtime.engine.speculation.ngram import MATCH_TOKENS, NGramIndex
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


def test_a_request_that_repeats_takes_fewer_steps(write_model: WriteModel, make_engine: MakeEngine) -> None:
    request = Request("0", [9, 6, 7], greedy(120, logit_bias=((5, 1000.0),)))
    expected = generate(make_engine(write_model()), [request])["0"]
    engine = make_engine(
        write_model(),
        speculation_method=SpeculationMethod.N_GRAM,
        max_draft_tokens=6,
        speculation_governor=GovernorMode.DISABLED,
    )
    assert generate(engine, [request])["0"] == expected
    counts = engine.stats().speculation
    assert counts is not None
    assert len(counts.accepted_per_position) == 6
    assert counts.num_accepted_tokens > 90
    assert engine.stats().steps_total == 120 - counts.num_accepted_tokens
