"""The answer ends before the first stop string, however the text arrives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream_runtime.server.openai.stop_strings import StopStrings

letters = st.text(alphabet="ab", max_size=30)


def shown(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    state = StopStrings(stops)
    text = "".join(state.push(piece) for piece in pieces)
    return text + state.finish(), state.found


@given(st.lists(letters, max_size=8), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_the_text_before_the_first_stop_string_is_shown_and_nothing_of_it(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    # Streaming cannot look ahead: the first stop string to be complete wins, and it is cut at its beginning.
    ends = [end for end in range(len(whole) + 1) if any(whole[:end].endswith(stop) for stop in stops)]
    text, found = shown(stops, list(whole))  # one character at a time
    assert found == bool(ends)
    if ends:
        longest = max(len(stop) for stop in stops if whole[: ends[0]].endswith(stop))
        assert text == whole[: ends[0] - longest]
    else:
        assert text == whole
    in_pieces, found_in_pieces = shown(stops, pieces)
    assert found_in_pieces == found
    assert not any(stop in in_pieces for stop in stops)


def test_what_might_become_a_stop_string_is_held_back_and_released() -> None:
    state = StopStrings(["\nUser:"])
    assert [state.push(text) for text in ("Hello.\n", "Us", "ually")] == ["Hello.", "", "\nUsually"]


def test_nothing_is_shown_after_the_end() -> None:
    state = StopStrings(["END"])
    assert [state.push(text) for text in ("a E", "N", "D b", "more")] == ["a ", "", "", ""]
    assert state.finish() == ""
