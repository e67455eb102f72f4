"""Whether a pinned plan would be made differently today. Pure.

The choice is made on all GPUs in the cluster, free or not: pods come and go, and a plan is not outdated because a pod
of another deployment ended. It is outdated when today's choice is neither the pinned one nor what was preferred when it
was made (`status.plan.preferred`): then nodes, prices or the planner have changed. Such a choice counts only while its
pods could start, with the GPUs of the owner's own pods given up (`rollout/pinning.py` asks): a plan that others keep
from starting is no gain. A plan is outdated, too, when the same choice would be rendered to different pods: then the
default image, the pods' defaults or the operator's version have changed.

Under `updatePolicy: FollowOperator` another choice is adopted only if it gains enough (`LEAST_SAVING_PERCENT`), so that
small changes of prices move no pods to and fro.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from millstream_operator.rollout.same_pods import makes_the_same_pods

Decide = Callable[[Facts], Plan | Infeasible]
Render = Callable[[Plan], Revision]
# What the planner chose, as fields of `status.plan`. Limits, predictions and prices are no choice of their own.
CHOICE_FIELDS = (
    "accelerator",
    "gpusPerReplica",
    "tensorParallelSize",
    "pipelineParallelSize",
    "quantization",
    "kvCache",
)
WORDS_FOR_NO_METHOD = ("None", "BF16", "FP16", "FP32")
PINNED_HINT = "It is adopted when the spec next changes, or at once under runtime.updatePolicy FollowOperator."
FOLLOWS_HINT = "It is adopted as soon as its GPUs are free."
LEAST_SAVING_PERCENT = 10
TOO_LITTLE_HINT = (
    f"runtime.updatePolicy FollowOperator adopts a plan that costs at least {LEAST_SAVING_PERCENT} % less (without "
    "prices: that needs fewer GPUs), so the pinned one is kept until the spec next changes."
)


@dataclass(frozen=True, slots=True)
class NewPlan(Diagnosis):
    """What a new plan would be and gain. `revision`: as it would be rendered; `gains`: enough to be adopted."""

    revision: Revision | None = None
    gains: bool = True


def outdated(
    pinned: Revision, facts: Facts, decide: Decide, render: Render, *, follows: bool = False
) -> NewPlan | None:
    """Return what a new plan would be and gain; None while the pinned one is as good as new.

    `follows`: the plan is adopted without a change of the spec, so the hint says what that waits for.
    """
    hint = FOLLOWS_HINT if follows else PINNED_HINT
    everything = replace(facts, inventory=facts.capacity or facts.inventory, capacity=None)
    today = decide(everything)
    if isinstance(today, Infeasible) or today.requires:
        return None
    if today.product is None and pinned.plan.get("memory"):
        return None  # less is known than then: nothing to gain
    if not same_choice(pinned.plan, today.status_plan()):
        again = _same_choice_today(pinned.plan, everything, decide)
        if pinned.plan.get("preferred") is None or not _was_preferred(pinned.plan, today, again):
            gains = again is None or _gains(pinned.plan, today, facts.catalog)
            words = _instead(pinned.plan, today, facts.catalog)
            return NewPlan(
                Reason.NEW_FACTS,
                words,
                TOO_LITTLE_HINT if follows and not gains else hint,
                revision=render(today),
                gains=gains,
            )
        if again is None:
            return None
        today = again
    fresh = render(today)
    if makes_the_same_pods(fresh, pinned):
        return None
    return NewPlan(Reason.NEW_DEFAULTS, other_defaults(pinned.image, fresh.image), hint, revision=fresh)


def same_choice(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether two `status.plan`s made the same choice. A field that an older operator did not store is not compared."""
    return all(before[field] == after[field] for field in CHOICE_FIELDS if field in before and field in after)


def already_failed(problem: Diagnosis, failure: Failure) -> Diagnosis:
    """The diagnosis of an outdated plan whose successor was adopted and failed."""
    hint = f"It was adopted and failed ({failure.reason}), so it is not tried again until the spec changes."
    return replace(problem, hint=hint)


def other_defaults(before: str, after: str) -> str:
    """What is rendered differently though the plan is the same. `before` and `after` are images."""
    if before != after:
        return f"A new plan would run the image {after} instead of {before}."
    return "A new plan would render other pods: the pods' defaults or the operator's version have changed."


def _was_preferred(before: Mapping[str, Any], today: Plan, again: Plan | None) -> bool:
    """Whether today's choice was preferred to the pinned one already then. `again`: the pinned choice, planned today.

    `preferred` is stored as a summary alone, so it is compared as a token, which needs that the summaries of then and
    now are worded alike but for the dtype. The pinned choice has both: where its two summaries differ, the tokens
    cannot be compared, and the plan counts as up to date rather than as outdated by a choice of words.
    """
    is_worded_alike = again is None or _token(again.summary) == _token(before["summary"])
    return _token(today.summary) == _token(before["preferred"]) or not is_worded_alike


def _token(summary: str) -> str:
    """A summary without the dtype at its end, for which earlier versions wrote None."""
    layout, _, weights = summary.rpartition(" ")
    return layout if weights in WORDS_FOR_NO_METHOD else summary


def _instead(before: Mapping[str, Any], today: Plan, catalog: GpuCatalog) -> str:
    """`A new plan would be 1×H100-80GB TP1 BF16 instead of 2×A100-80GB TP2 BF16: $1,204 a month less.`"""
    change = f"A new plan would be {_words(before, today)} instead of {before['summary']}"
    monthly_usd = _monthly_usd(before, today, catalog)
    if monthly_usd is None or today.cost is None:
        return f"{change}."
    saved = monthly_usd - today.cost.monthly_usd
    if saved == 0:
        return f"{change}, at the same price."
    return f"{change}: ${abs(saved):,} a month {'less' if saved > 0 else 'more'}."


def _monthly_usd(before: Mapping[str, Any], today: Plan, catalog: GpuCatalog) -> int | None:
    """The pinned plan at today's prices; None where its GPU has none."""
    part = catalog.get(before.get("accelerator") or "")
    if part is None:
        return None
    hourly_milli_usd: int = part.hourly_milli_usd * before["gpusPerReplica"] * _replicas(before, today)
    return round(hourly_milli_usd * HOURS_PER_MONTH / 1000)


def _gains(before: Mapping[str, Any], today: Plan, catalog: GpuCatalog) -> bool:
    """Whether today's plan costs so much less that moving the pods is worth it."""
    monthly_usd = _monthly_usd(before, today, catalog)
    if monthly_usd is None or today.cost is None:
        replicas = _replicas(before, today)
        return bool(today.gpus_per_replica * (today.replicas or replicas) < before["gpusPerReplica"] * replicas)
    return (monthly_usd - today.cost.monthly_usd) * 100 >= LEAST_SAVING_PERCENT * monthly_usd


def _replicas(before: Mapping[str, Any], today: Plan) -> int:
    return int(before.get("replicas") or today.replicas or 1)


def _words(before: Mapping[str, Any], today: Plan) -> str:
    """Today's plan. A summary does not name the KV cache, so it is added where it changes."""
    changed = before.get("kvCache", today.kv_cache) != today.kv_cache
    return f"{today.summary} with KV cache {today.kv_cache}" if changed else today.summary


def _same_choice_today(before: Mapping[str, Any], facts: Facts, decide: Decide) -> Plan | None:
    """The pinned choice, planned today; None where it cannot be made any more."""
    again = decide(_of_part_alone(facts, before.get("accelerator")))
    return again if isinstance(again, Plan) and same_choice(before, again.status_plan()) else None


def _of_part_alone(facts: Facts, part: str | None) -> Facts:
    inventory = facts.inventory
    if inventory is None:
        return facts
    kinds = tuple(kind for kind in inventory.kinds if kind.part.name == part)
    return replace(facts, inventory=Inventory(kinds, inventory.refused))
