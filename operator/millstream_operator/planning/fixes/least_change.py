"""Of the values with which there is a plan, the one that changes least: by bisection, ten plans for 1000 values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.change import Change
from millstream_operator.planning.plan import Infeasible, Plan

Replan = Callable[[LLMDeployment, Facts], Plan | Infeasible]


def least(
    values: Sequence[int], before: int, make: Callable[[int], Change | None], replan: Replan
) -> Iterator[Change | None]:
    """Yield the change to the first of `values` that leads to a plan. Values are ordered by how much they change.

    A value that is farther must never be worse. Where none does, the farthest is yielded: with another edit it may.
    """
    if not values:
        return
    first, last = 0, len(values) - 1
    if _is_planned(make(values[last]), replan):
        while first < last:
            middle = (first + last) // 2
            if _is_planned(make(values[middle]), replan):
                last = middle
            else:
                first = middle + 1
    if (change := make(values[last])) is not None:
        yield replace(change, step=change_of(before, values[last]))


def change_of(before: float, after: float) -> float:
    """How far apart two numbers are, the same for a half as for a double."""
    return abs(math.log(max(after, 1e-9) / max(before, 1e-9)))


def _is_planned(change: Change | None, replan: Replan) -> bool:
    if change is None:
        return False
    planned = replan(change.deployment, change.facts)
    return isinstance(planned, Plan) and not planned.requires
