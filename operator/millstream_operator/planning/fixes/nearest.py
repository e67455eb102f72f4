"""The nearest changes that make an infeasible spec feasible, each proved by planning again with it.

Nearest means: first what costs only length, then what costs quality, then what costs money. A change that does not
help is not mentioned.
"""

from __future__ import annotations

from collections.abc import Iterator

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.planning.choices.outcome import Outcome
from millstream_operator.planning.choices.placement import Choice, NoPlacement
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.change import Change
from millstream_operator.planning.fixes.gpu_changes import more_gpus, other_products, present_products
from millstream_operator.planning.fixes.spec_changes import Replan, larger_budget, looser_latency, spec_changes
from millstream_operator.planning.plan import MAX_FIXES, Fix

MAX_TRIES, MAX_SPARE_TRIES = 16, 6  # plans; each takes a millisecond or two


def nearest_fixes(deployment: LLMDeployment, facts: Facts, stopped: NoPlacement, replan: Replan) -> tuple[Fix, ...]:
    """Return at most three changes that were planned again and found feasible, of different fields first."""
    found: list[Fix] = []
    spare: list[Change] = []  # more of a field that has a fix already
    tries = 0
    for change in _all_changes(deployment, facts, stopped, replan):
        if len(found) == MAX_FIXES or tries == MAX_TRIES:
            break
        if change.field in {fix.field for fix in found}:
            spare.append(change)
            continue
        tries += 1
        if (fix := _proved(change, replan)) is not None:
            found.append(fix)
    for change in spare[:MAX_SPARE_TRIES]:
        if len(found) < MAX_FIXES and (fix := _proved(change, replan)) is not None:
            found.append(fix)
    return tuple(found)


def _all_changes(deployment: LLMDeployment, facts: Facts, stopped: NoPlacement, replan: Replan) -> Iterator[Change]:
    """Yield everything that may help, nearest first: the field that binds, fewer bits, more GPUs, other GPUs."""
    constraint = stopped.problem.stage.constraint
    if constraint == "latency":
        yield from looser_latency(deployment, facts, replan)
    if constraint == "budget":
        yield from larger_budget(deployment, facts, replan)
    if constraint == "products":
        yield from present_products(deployment, facts)
    yield from spec_changes(constraint, deployment, facts)
    yield from more_gpus(constraint, deployment, facts)
    yield from other_products(deployment, facts)


def _proved(change: Change, replan: Replan) -> Fix | None:
    choice = replan(change.deployment, change.facts)
    if not isinstance(choice, Choice):
        return None
    if change.field == "parallelism.tensor" and choice.best.candidate.pipeline > 1:
        return None  # it would be the stages that help, not the size
    return Fix(change.field, change.value, described(choice.best))


def described(outcome: Outcome) -> str:
    """`2×A100-80GB TP2 None, $5,009 a month`."""
    cost = f", ${outcome.cost.monthly_usd:,} a month" if outcome.cost else ""
    replicas = f"{outcome.replicas} × " if outcome.replicas > 1 else ""
    return f"{replicas}{outcome.candidate.summary}{cost}"
