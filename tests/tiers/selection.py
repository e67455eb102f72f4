"""Which tests a tier runs. Pure: the same tests, tier and day give the same answer on every machine.

quick   `make test`: no deep test, and of each matrix the first case of each row
sample  `make test-all`: every test; of each matrix the first case of each row, and a quarter of its other cases
rest    what the sample has and the quick tier has not
whole   everything: plain pytest, `make test-all ALL=1`, `make soak`

The other cases of a matrix are dealt into four hands by the hash of their names. The day's ordinal number picks the
hand, so four days in a row see every case. A case keeps its place among its neighbours when others are added, and
neighbours that resemble each other rarely share a hand.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

DAYS_FOR_ALL_CASES = 4


class Tier(StrEnum):
    """What `--tier` takes."""

    QUICK = "quick"
    SAMPLE = "sample"
    REST = "rest"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Case:
    """A test as pytest collected it: one case of a parametrized function, or a function without parameters."""

    node_id: str
    is_deep: bool = False
    matrix: str = ""  # the node ID of the function, where it declares a matrix
    row: tuple[str, ...] = ()  # the arguments that name the case's row


def selected(cases: Sequence[Case], tier: Tier, day: int) -> set[str]:
    """The node IDs that `tier` runs on `day`, a date's ordinal number."""
    if tier is Tier.WHOLE:
        return {case.node_id for case in cases}
    rest_of_matrix: dict[str, list[str]] = defaultdict(list)
    first_of_rows: set[tuple[str, tuple[str, ...]]] = set()
    quick: set[str] = set()
    sample: set[str] = set()
    for case in cases:
        if case.matrix and (case.matrix, case.row) in first_of_rows:
            rest_of_matrix[case.matrix].append(case.node_id)
            continue
        first_of_rows.add((case.matrix, case.row))
        sample.add(case.node_id)
        if not case.is_deep:
            quick.add(case.node_id)
    for others in rest_of_matrix.values():
        sample.update(_hand_of_the_day(others, day))
    return {Tier.QUICK: quick, Tier.SAMPLE: sample, Tier.REST: sample - quick}[tier]


def _hand_of_the_day(node_ids: Iterable[str], day: int) -> list[str]:
    shuffled = sorted(node_ids, key=lambda node_id: hashlib.sha256(node_id.encode()).digest())
    return shuffled[day % DAYS_FOR_ALL_CASES :: DAYS_FOR_ALL_CASES]
