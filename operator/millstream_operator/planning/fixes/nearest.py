"""The nearest changes that make an infeasible spec one that is applied, each proved by planning again with it.

    edits of the spec   one field, or two where one does not do: what changes least first (`nearness.py`)
    nodes to add        of a product that the spec names or the cluster has, or of the cheapest other one

A change counts if the plan that it gives would be applied: it is feasible, the runtime can run it, and the API's rules
admit the spec. Edits come before nodes. What does not help is not mentioned, and nothing is mentioned twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.rules import violations
from millstream_operator.planning.choices.outcome import Stage
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.admission_changes import admission_changes
from millstream_operator.planning.fixes.change import Change
from millstream_operator.planning.fixes.gpu_changes import gpu_changes, just_enough
from millstream_operator.planning.fixes.least_change import Replan
from millstream_operator.planning.fixes.nearness import nearness
from millstream_operator.planning.fixes.number_changes import planned_monthly_usd
from millstream_operator.planning.fixes.patch import merge_patch
from millstream_operator.planning.fixes.spec_changes import spec_changes, without_unsupported
from millstream_operator.planning.plan import MAX_EDITS, MAX_GPU_FIXES, Fix, Infeasible, Plan
from millstream_operator.planning.resolved_spec import wanted_replicas

CANDIDATES = 12  # edits that are found before the nearest of them are kept
MAX_TRIES, MAX_FIRST_HALVES, MAX_SECOND_TRIES = 24, 6, 8  # plans; each takes a millisecond or two


@dataclass(frozen=True, slots=True)
class NearestFixes:
    """`unsupported`: plans of changes that help everything but the runtime; only where no change helps that, too."""

    fixes: tuple[Fix, ...] = ()
    unsupported: tuple[Plan, ...] = ()


def nearest_fixes(deployment: LLMDeployment, facts: Facts, constraint: str, replan: Replan) -> NearestFixes:
    """Return at most `MAX_EDITS` edits and `MAX_GPU_FIXES` nodes to add, the nearest of different fields first."""
    found = _search(deployment, facts, constraint, replan)
    runnable = without_unsupported(deployment, facts) if not found.fixes else None
    if runnable is None:
        return found
    planned = replan(runnable.deployment, runnable.facts)
    constraint = planned.constraint if isinstance(planned, Infeasible) else ""
    runnable_found = _search(deployment, runnable.facts, constraint, replan, runnable)
    return runnable_found if runnable_found.fixes else found


def _search(
    deployment: LLMDeployment, facts: Facts, constraint: str, replan: Replan, first: Change | None = None
) -> NearestFixes:
    """Search from the spec, or from what `first` makes of it: then that edit is a part of each fix."""
    base = first.deployment if first is not None else deployment
    edits, gpus = (_Search(deployment, replan, most, first) for most in (CANDIDATES, MAX_GPU_FIXES))
    if first is not None:
        edits.try_each([Change((), base, facts)])
    edits.try_each(spec_changes(constraint, base, facts, replan))
    edits.try_each(admission_changes(base, facts))
    edits.enough = MAX_EDITS
    edits.try_spare()
    if not edits.found:
        edits.try_second()
    gpus.try_each(gpu_changes(base, facts, replan))
    if not gpus.found and not edits.found:
        gpus.try_second(functools.partial(just_enough, facts, replan))
    fixes = (*edits.nearest(_stored_format(facts)), *gpus.found)
    return NearestFixes(fixes, () if fixes else _least(edits.unsupported + gpus.unsupported))


def _stored_format(facts: Facts) -> str:
    stored = facts.shape.quantization if facts.shape is not None else None
    return stored.method if stored is not None else "None"


def _least(plans: list[Plan]) -> tuple[Plan, ...]:
    """Those that lack least, one of each summary."""
    least = min((len(plan.requires) for plan in plans), default=0)
    named = {plan.summary: plan for plan in reversed(plans) if len(plan.requires) == least}
    return tuple(reversed(named.values()))[:MAX_GPU_FIXES]


@dataclass(slots=True)
class _Search:
    """Tries changes until enough are found. `halves`: changes that helped in part."""

    deployment: LLMDeployment
    replan: Replan
    enough: int
    first: Change | None = None
    found: list[Fix] = field(default_factory=list)
    unsupported: list[Plan] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)  # those of `found`, in the same order
    halves: dict[str, tuple[Change, Infeasible]] = field(default_factory=dict)  # the last of each field
    trim: Callable[[Change, Plan], Change] | None = None
    _spare: list[Change] = field(default_factory=list)

    def try_each(self, changes: Iterable[Change], most: int = MAX_TRIES) -> None:
        """Plan with each change; other values of a field that has a fix already are kept for `try_spare`."""
        tries = 0
        for change in changes:
            if len(self.found) >= self.enough or tries == most:
                return
            if not change.adds_nodes and change.field in {fix.field for fix in self.found}:
                self._spare.append(change)
                continue
            tries += 1
            self._try(change)

    def nearest(self, stored: str) -> list[Fix]:
        """Those that change least. `stored`: the format of the checkpoint."""
        ranked = sorted(zip(self.changes, self.found, strict=True), key=lambda pair: nearness(pair[0], stored))
        return [fix for _, fix in ranked[:MAX_EDITS]]

    def try_spare(self) -> None:
        """Fill up with other values of the same fields."""
        for change in self._spare[:MAX_SECOND_TRIES]:
            if len(self.found) < self.enough:
                self._try(change)

    def try_second(self, trim: Callable[[Change, Plan], Change] | None = None) -> None:
        """Try an edit after each change that helped in part. `trim`: what to make of two that help together."""
        self.trim = trim
        farthest = sorted(self.halves.values(), key=lambda half: -Stage[half[1].constraint.upper()])
        for first, problem in farthest[:MAX_FIRST_HALVES]:
            seconds = spec_changes(problem.constraint, first.deployment, first.facts, self.replan)
            self.try_each((second.after(first) for second in seconds), MAX_SECOND_TRIES)

    def _try(self, change: Change) -> None:
        planned = self.replan(change.deployment, change.facts)
        if self.trim is not None and isinstance(planned, Plan):
            change = self.trim(change, planned)
            planned = self.replan(change.deployment, change.facts)
        if isinstance(planned, Infeasible):
            self.halves[change.field if not change.adds_nodes else change.value] = change, planned
            return
        if planned.requires:
            self.unsupported.append(planned)
            return
        change = change.after(self.first) if self.first is not None else change
        change, planned = self._needed(change, planned)
        patch = merge_patch(self.deployment, change.deployment)
        if any(violations(change.deployment)) or (patch is None and not change.adds_nodes):
            return
        if change.field.endswith("parallelism.tensor") and planned.pipeline_parallel_size > 1:
            return  # it would be the stages that help, not the size
        fix = Fix(change.field, change.value, described(planned, change.deployment), patch)
        if not any(_is_same(fix, other) for other in self.found):
            self.found.append(fix)
            self.changes.append(change)

    def _needed(self, change: Change, plan: Plan) -> tuple[Change, Plan]:
        """The change without the fields that the others make needless, and its plan."""
        for field_name, _ in change.fields:
            if len(change.fields) < 2 or (less := change.without(field_name, self.deployment)) is None:
                continue
            planned = self.replan(less.deployment, less.facts)
            if isinstance(planned, Plan) and not planned.requires and not any(violations(less.deployment)):
                change, plan = less, planned
        return change, plan


def _is_same(fix: Fix, other: Fix) -> bool:
    """Whether two fixes lead to one plan by the same field, or by one that holds it."""
    longer, shorter = sorted((fix.field, other.field), key=len, reverse=True)
    return fix.summary == other.summary and (longer == shorter or longer.startswith((f"{shorter}.", f"{shorter},")))


def described(plan: Plan, deployment: LLMDeployment) -> str:
    """`2×A100-80GB TP2 BF16, $5,009 a month`."""
    replicas = max(plan.replicas or 1, wanted_replicas(deployment.spec))
    usd = planned_monthly_usd(plan, deployment)
    cost = f", ${usd:,} a month" if usd is not None else ""
    return f"{f'{replicas} × ' if replicas > 1 else ''}{plan.summary}{cost}"
