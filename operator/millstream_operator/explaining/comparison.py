"""Compare plans of the same deployment with another tier, another GPU or another weight format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.workload import Tier
from millstream_operator.explaining.text import Style, columns, dollars
from millstream_operator.inventory.node_kinds import Inventory
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.change import with_field
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide

METHODS = ("None", "FP8", "INT8", "AWQ")
HEADER = ("", "plan", "replicas", "$/month", "$/M tokens", "TTFT ms", "at once", "ITL ms", "tokens/s")

AT_ONCE = "  at once: requests of usual length that run together; ITL and tokens/s are predicted for that number"


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    plan: Plan | Infeasible

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, **self.plan.status_plan()}


def compare(axis: str, deployment: LLMDeployment, defaults: PlanDefaults, facts: Facts) -> list[Row]:
    """Return one row per variation, in a fixed order; infeasible ones too, with their reason."""
    return [
        Row(name, decide(changed, defaults, known)) for name, changed, known in _variations(axis, deployment, facts)
    ]


def comparison_table(rows: list[Row], style: Style) -> str:
    """Return cost and latency by row; an infeasible row has its reason instead."""
    cells = [list(HEADER)]
    notes = []
    for row in rows:
        if isinstance(row.plan, Infeasible):
            notes.append([row.name, row.plan.message])
            continue
        cells.append([row.name, *_numbers(row.plan)])
    lines = columns(cells)
    lines[0] = style.bold(lines[0])
    if len(cells) > 1:
        lines += ["", AT_ONCE]
    if notes:
        lines += ["", style.bold("  infeasible"), *columns(notes, indent=4)]
    return "\n".join(line.rstrip() for line in lines)


def _numbers(plan: Plan) -> list[str]:
    cost, predicted = plan.cost, plan.predicted
    per_million = cost.per_million_tokens_milli_usd if cost else None
    return [
        plan.summary,
        str(plan.replicas),
        f"{cost.monthly_usd:,}" if cost else "-",
        dollars(per_million) if per_million is not None else "-",
        str(predicted.ttft_milliseconds) if predicted else "-",
        str(predicted.concurrent_sequences) if predicted else "-",
        f"{predicted.itl_microseconds / 1000:.1f}" if predicted else "-",
        str(predicted.tokens_per_second) if predicted else "-",
    ]


def _variations(axis: str, deployment: LLMDeployment, facts: Facts) -> Iterator[tuple[str, LLMDeployment, Facts]]:
    if axis == "tiers":
        for tier in Tier:
            yield tier.value, with_field(deployment, "tier", tier.value), facts
    elif axis == "quantizations":
        stored = facts.shape.quantization if facts.shape else None
        for method in (stored.method,) if stored else METHODS:
            yield method, with_field(deployment, "quantization.method", method), facts
    elif facts.inventory is not None:
        kinds = (facts.capacity or facts.inventory).kinds
        for name in dict.fromkeys(kind.part.name for kind in kinds):
            only = tuple(kind for kind in kinds if kind.part.name == name)
            inventory = Inventory(only, (), facts.inventory.hypothetical)
            yield name, deployment, replace(facts, inventory=inventory, capacity=None)
