"""Has the world changed so that a pinned plan would be made otherwise today? Pure.

The question is asked of all GPUs that there are, free or not: pods come and go, and a plan is not outdated because
somebody else's pod ended. It is when today's choice is neither the pinned plan nor what was preferred when it was made
(`status.plan.preferred`): then nodes, prices or the planner itself have changed. And it is when the same choice would
be rendered to other pods: the default image, the pods' defaults or the operator's version has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from millstream_operator.catalog.gpu import GpuCatalog
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.inventory.node_kinds import Inventory
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Infeasible, Plan
from millstream_operator.planning.sizing.cost import HOURS_PER_MONTH
from millstream_operator.rendering.revision import Revision
from millstream_operator.rendering.revision_marks import Failure

Decide = Callable[[Facts], Plan | Infeasible]
Render = Callable[[Plan], Revision]
PINNED = "It is taken over when the spec next changes, or at once under runtime.updatePolicy FollowOperator."
FOLLOWS = "It is taken over as soon as its GPUs are free."


def outdated(
    pinned: Revision, facts: Facts, decide: Decide, render: Render, *, follows: bool = False
) -> Diagnosis | None:
    """What a new plan would be, and gain; None while the pinned one is as good as new.

    `follows`: it is taken over by itself, so the sentence says what it waits for.
    """
    when = FOLLOWS if follows else PINNED
    everything = replace(facts, inventory=facts.capacity or facts.inventory, capacity=None)
    today = decide(everything)
    before = pinned.plan["summary"]
    if isinstance(today, Infeasible) or today.requires:
        return None
    if today.product is None and pinned.plan.get("memory"):
        return None  # less is known than then: nothing to gain
    if today.summary not in (before, pinned.plan.get("preferred")):
        return Diagnosis(Reason.NEW_FACTS, f"{_instead(pinned.plan, today, facts.catalog)} {when}")
    if today.summary != before:
        again = decide(_of_part_alone(everything, pinned.plan.get("accelerator")))
        if isinstance(again, Infeasible) or again.summary != before:
            return None
        today = again
    fresh = render(today)
    if fresh.digest == pinned.digest:
        return None
    return Diagnosis(Reason.NEW_DEFAULTS, f"{other_defaults(pinned.image, fresh.image)} {when}")


def tried_in_vain(problem: Diagnosis, failure: Failure) -> Diagnosis:
    """The same, of a plan that was taken over by itself and failed."""
    said = problem.message.removesuffix(FOLLOWS).strip()
    why = f"It was taken over and failed ({failure.reason}), so it is not tried again until the spec changes."
    return Diagnosis(problem.reason, f"{said} {why}")


def other_defaults(before: str, after: str) -> str:
    """One sentence on what is rendered otherwise though the plan is the same."""
    if before != after:
        return f"A new plan would run the image {after} instead of {before}."
    return "A new plan would render other pods: the pods' defaults or the operator's version have changed."


def _instead(before: dict[str, Any], today: Plan, catalog: GpuCatalog) -> str:
    """`A new plan would be 1×H100-80GB TP1 None instead of 2×A100-80GB TP2 None: $1,204 a month less.`"""
    said = f"A new plan would be {today.summary} instead of {before['summary']}"
    part = catalog.get(before.get("accelerator") or "")
    if part is None or today.cost is None:
        return f"{said}."
    replicas = before.get("replicas") or today.replicas or 1
    hourly_milli_usd = part.hourly_milli_usd * before["gpusPerReplica"] * replicas  # at today's prices
    saved = round(hourly_milli_usd * HOURS_PER_MONTH / 1000) - today.cost.monthly_usd
    if saved == 0:
        return f"{said}, at the same price."
    return f"{said}: ${abs(saved):,} a month {'less' if saved > 0 else 'more'}."


def _of_part_alone(facts: Facts, part: str | None) -> Facts:
    inventory = facts.inventory
    if inventory is None:
        return facts
    kinds = tuple(kind for kind in inventory.kinds if kind.part.name == part)
    return replace(facts, inventory=Inventory(kinds, inventory.refused))
