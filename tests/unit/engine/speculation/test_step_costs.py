"""`StepCosts`: what it learns of steps, and what it says of those that it never saw."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_runtime.engine.speculation.step_costs import StepCosts


def line(length: float) -> float:
    return 0.010 + 0.002 * length


def test_unseen_lengths_lie_on_the_line_between_and_behind_those_that_were_seen() -> None:
    costs = StepCosts(8)
    for length in (0.0, 4.0):
        costs.observe(length, line(length))
    for length in (0.0, 0.5, 1.0, 3.0, 4.0, 6.0, 8.0):
        assert costs.seconds(length) == pytest.approx(line(length))


def test_steps_without_drafts_alone_say_that_a_draft_costs_as_much_as_a_step() -> None:
    costs = StepCosts(4)
    assert costs.seconds(2) == 0
    costs.observe(0, 0.01)
    assert costs.seconds(3) == pytest.approx(0.04)


def test_a_larger_batch_stands_in_for_what_was_not_timed() -> None:
    larger = StepCosts(4)
    for length in (0.0, 4.0):
        larger.observe(length, 2 * line(length))
    costs = StepCosts(4, larger)
    costs.observe(0, 0.01)
    assert costs.seconds(4) == pytest.approx(line(4))


def test_steps_between_two_knots_are_learned_as_well() -> None:
    costs, rng = StepCosts(4), random.Random(1)
    for _ in range(2000):
        length = rng.choice([0.0, 0.25, 1.5, 3.75])
        costs.observe(length, line(length) * rng.uniform(0.95, 1.05))
    for length in (0.25, 1.5, 3.75):
        assert costs.seconds(length) == pytest.approx(line(length), rel=0.05)


def test_one_step_that_was_held_up_changes_little_even_if_it_is_the_first() -> None:
    costs = StepCosts(4)
    for seconds in (0.03, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01):
        costs.observe(0, seconds)
    assert costs.seconds(0) < 0.012
    costs.observe(0, 0.1)
    assert costs.seconds(0) < 0.013


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_a_lasting_change_is_followed(factor: float) -> None:
    costs = StepCosts(4)
    for _ in range(50):
        costs.observe(2, 0.01)
    for _ in range(100):
        costs.observe(2, 0.01 * factor)
    assert costs.seconds(2) == pytest.approx(0.01 * factor, rel=0.05)


def test_what_makes_all_steps_slower_moves_lengths_that_are_not_timed_meanwhile() -> None:
    costs = StepCosts(4)
    for length in (0.0, 1.0, 4.0) * 6:
        costs.observe(length, line(length))
    for _ in range(100):
        costs.observe(1, 2 * line(1))
    assert costs.seconds(1) == pytest.approx(2 * line(1), rel=0.05)
    for length in (0.0, 4.0):
        assert 1.4 * line(length) < costs.seconds(length) < 2.1 * line(length)


def test_a_length_that_was_held_up_is_drawn_to_the_line_of_the_others() -> None:
    costs = StepCosts(8)
    for length in (0.0, 1.0, 2.0, 3.0, 4.0) * 10:
        costs.observe(length, line(length))
    for _ in range(5):
        costs.observe(8, 1.5 * line(8))
    assert costs.seconds(8) < 1.45 * line(8)


LENGTHS = st.integers(1, 64).flatmap(lambda decodes: st.integers(0, 4 * decodes).map(lambda drafts: drafts / decodes))


@given(st.lists(st.tuples(LENGTHS, st.floats(1e-6, 10)), min_size=1, max_size=40), LENGTHS)
def test_no_step_takes_less_than_no_time(steps: list[tuple[float, float]], length: float) -> None:
    costs = StepCosts(4)
    for drafts_per_decode, seconds in steps:
        costs.observe(drafts_per_decode, seconds)
    assert costs.seconds(length) > 0
    assert all(one > 0 for one in costs.line())
