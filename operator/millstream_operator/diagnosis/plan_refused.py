"""A plan that must not be applied, with the reason that the status gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream_operator.diagnosis.conditions import Condition
from millstream_operator.diagnosis.decisions import Decision
from millstream_operator.diagnosis.diagnosis import Diagnosis

# How soon the operator looks again at what it does not watch: GPUs, prices, claims, other owners' objects.
RECHECK_SECONDS = 30.0


class PlanRefused(Exception):
    """A plan that must not be applied: it is infeasible, or needs what the runtime cannot do. Nothing is changed."""

    is_soon_over = False  # another reconcile is about to provide what is missing
    conditions: Sequence[Condition] = ()  # besides Ready and Planned: what the refusal says about the model
    decisions: Sequence[Decision] = ()  # that the journal may lack

    def __init__(self, problem: Diagnosis, plan: dict[str, Any] | None, recheck_seconds: float | None = None) -> None:
        """`plan`: what was planned and not applied. `recheck_seconds`: where time alone may help."""
        super().__init__(problem.message)
        self.problem, self.plan, self.recheck_seconds = problem, plan, recheck_seconds
