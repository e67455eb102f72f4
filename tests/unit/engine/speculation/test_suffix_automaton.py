"""The suffix automaton: the longest run at the end of a text that stood in it before, and where."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_runtime.engine.speculation.suffix_automaton import Match, SuffixAutomaton

TEXTS = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), max_size=32))


def searched(text: list[int]) -> Match:
    """The same by looking through the whole text: the longest run, its latest place."""
    for num_tokens in range(len(text) - 1, 0, -1):
        for end in range(len(text) - 1, num_tokens - 1, -1):
            if text[end - num_tokens : end] == text[-num_tokens:]:
                return Match(num_tokens, end)
    return Match(0, 0)


def test_the_longest_run_and_its_latest_place() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 3, 9, 1, 2, 3, 8, 7, 2, 3])
    assert automaton.match == Match(2, 7)  # 2, 3 stood at 1 and at 5
    automaton.extend([])
    automaton.extend([9, 1])
    assert automaton.match == Match(4, 5)  # 2, 3, 9, 1


@settings(max_examples=40)
@given(TEXTS)
def test_it_finds_what_a_search_finds(text: list[int]) -> None:
    automaton = SuffixAutomaton(most_renewed_states=len(text))
    for known, token_id in enumerate(text, 1):
        automaton.extend([token_id])
        found = searched(text[:known])
        assert automaton.match.num_tokens == found.num_tokens
        assert automaton.match == found or not found.num_tokens
    assert len(automaton._next) <= 2 * len(text) + 1


@settings(max_examples=40)
@given(TEXTS)
def test_with_bounded_work_per_token_the_place_is_a_right_one(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for known, token_id in enumerate(text, 1):
        automaton.extend([token_id])
        num_tokens, end = automaton.match
        assert num_tokens == searched(text[:known]).num_tokens
        assert end < known
        assert text[end - num_tokens : end] == text[known - num_tokens : known]


def test_steps_per_token_stay_few_however_often_it_repeats() -> None:
    """Blumer et al.: 2n states, and 3n transitions, at most, of any text."""
    for text in ([5] * 3000, [1, 2] * 1500, [*range(1500)] * 2):
        automaton = SuffixAutomaton()
        automaton.extend(text)
        assert automaton.num_tokens == 3000
        assert len(automaton._next) <= 2 * 3000
        assert sum(map(len, automaton._next)) <= 3 * 3000


@settings(max_examples=40)
@given(TEXTS, st.integers(1, 8))
def test_in_runs_or_token_by_token_it_is_the_same(text: list[int], run_tokens: int) -> None:
    in_runs, one_by_one = SuffixAutomaton(), SuffixAutomaton()
    for start in range(0, len(text), run_tokens):
        in_runs.extend(text[start : start + run_tokens])
    for token_id in text:
        one_by_one.extend([token_id])
    assert in_runs.match == one_by_one.match
    assert in_runs.num_tokens == one_by_one.num_tokens == len(text)
