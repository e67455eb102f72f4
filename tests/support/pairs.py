"""Which cases of a matrix with three or more arguments are tests: as many as every pair of values needs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any


def every_pair(*arguments: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return every combination of all arguments but the last, each with one value of the last, which takes turns.

    Faults of the engine that depend on circumstances depend on one or two of them at once (Kuhn, Wallace and Gallo,
    "Software fault interactions and implications for software testing", 2004), and the mutants of `tests/mutations`
    that a whole product kills, these cases kill. Every two values of two arguments meet where another argument than
    the two has as many values as the last.
    """
    *leading, last = [list(values) for values in arguments]
    return [
        (*combination, last[sum(places) % len(last)])
        for places, combination in zip(
            product(*(range(len(values)) for values in leading)), product(*leading), strict=True
        )
    ]
