"""What a decode step takes, by its number of rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_runtime.engine.scheduling.decode_times import DecodeTimes, growth_of


@given(fixed=st.floats(1e-4, 0.1), per_row=st.floats(0.0, 1e-2), slower=st.floats(0.1, 10.0))
def test_a_line_is_found_from_two_points_and_follows_one_more(fixed: float, per_row: float, slower: float) -> None:
    """Two are timed at warm-up; then the machine or the contexts change, and any one step shows by how much."""
    decodes = DecodeTimes(growth_of({1: fixed + per_row, 16: fixed + 16 * per_row}))
    decodes.observe(40, slower * (fixed + 40 * per_row))
    if (fixed + per_row) * 0.1 < fixed:  # the part that no row causes can be told from noise
        assert decodes.seconds(7) == pytest.approx(slower * (fixed + 7 * per_row), rel=1e-6)


def test_one_outlier_is_ignored() -> None:
    decodes = DecodeTimes(0.5)
    for seconds in (0.01, 0.01, 1.0, 0.01):
        decodes.observe(2, seconds)
    assert decodes.seconds(2) == pytest.approx(0.01)


@pytest.mark.parametrize("seconds", [{}, {1: 0.01}, {16: 0.01}])
def test_one_number_of_rows_shows_no_growth(seconds: dict[int, float]) -> None:
    assert growth_of(seconds) == 0.0


def test_noise_makes_no_negative_growth_and_none_without_bound() -> None:
    assert growth_of({1: 0.010, 16: 0.009}) == 0.0
    assert growth_of({1: 0.001, 16: 1.0}) < 1000


def test_nothing_is_known_before_a_step_was_timed() -> None:
    assert DecodeTimes(0.1).seconds(5) == 0.0
