"""What a tier runs of given tests, on which day."""

from __future__ import annotations

from itertools import product

import pytest

from tests.tiers.selection import DAYS_FOR_ALL_CASES, Case, Tier, selected

MATRIX = "test_engine.py::test_parity"
FAMILIES, MODES = ("llama", "qwen2", "gemma"), ("plain", "overlapped", "sliced", "replayed", "parallel")
PARITY = [Case(f"{MATRIX}[{row}-{column}]", False, MATRIX, (row,)) for row, column in product(FAMILIES, MODES)]
CASES = [*PARITY, Case("test_a.py::test_plain"), Case("test_b.py::test_slow", is_deep=True)]
FIRST_OF_ROWS = {f"{MATRIX}[{row}-plain]" for row in FAMILIES}
NAMES = {case.node_id for case in CASES}


def test_the_quick_tier_has_the_first_case_of_each_row_and_no_deep_test() -> None:
    assert selected(CASES, Tier.QUICK, day=0) == FIRST_OF_ROWS | {"test_a.py::test_plain"}


def test_the_quick_tier_is_the_same_every_day() -> None:
    assert len({frozenset(selected(CASES, Tier.QUICK, day)) for day in range(10)}) == 1


@pytest.mark.parametrize("first_day", [0, 3, 740_003])
def test_four_days_in_a_row_see_every_case_and_each_its_quarter(first_day: int) -> None:
    samples = [selected(CASES, Tier.SAMPLE, first_day + day) for day in range(DAYS_FOR_ALL_CASES)]
    assert set().union(*samples) == NAMES
    others = len(PARITY) - len(FIRST_OF_ROWS)
    every_day = FIRST_OF_ROWS | {"test_a.py::test_plain", "test_b.py::test_slow"}
    assert all(sample >= every_day for sample in samples)
    assert {len(sample - every_day) for sample in samples} == {others // DAYS_FOR_ALL_CASES}


def test_the_rest_is_what_the_quick_tier_leaves_of_the_sample() -> None:
    quick, sample, rest = (selected(CASES, tier, 5) for tier in (Tier.QUICK, Tier.SAMPLE, Tier.REST))
    assert quick | rest == sample
    assert not quick & rest


def test_the_whole_is_everything() -> None:
    assert selected(CASES, Tier.WHOLE, 5) == NAMES


def test_a_deep_matrix_is_in_the_sample_alone() -> None:
    deep = [Case(case.node_id, True, case.matrix, case.row) for case in PARITY]
    assert selected(deep, Tier.QUICK, 5) == set()
    assert selected(deep, Tier.SAMPLE, 5) > FIRST_OF_ROWS


def test_a_matrix_without_rows_is_one_row() -> None:
    cases = [Case(f"{MATRIX}[{number}]", False, MATRIX) for number in range(9)]
    assert selected(cases, Tier.QUICK, 5) == {f"{MATRIX}[0]"}
    assert len(selected(cases, Tier.SAMPLE, 5)) == 1 + 8 // DAYS_FOR_ALL_CASES


def test_another_case_moves_no_other_row_and_few_neighbours() -> None:
    more = [*CASES, Case(f"{MATRIX}[mixtral-plain]", False, MATRIX, ("mixtral",))]
    assert selected(more, Tier.SAMPLE, 5) == selected(CASES, Tier.SAMPLE, 5) | {f"{MATRIX}[mixtral-plain]"}
