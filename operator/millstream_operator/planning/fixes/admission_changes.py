"""Tolerations and a wider nodeSelector with which nodes that are left out count, as edits of the pod template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.inventory.left_out import LeftOut
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.change import Change, edit, spec_of
from millstream_operator.planning.left_out_nodes import with_group

TOLERATIONS, NODE_SELECTOR = "podTemplate.spec.tolerations", "podTemplate.spec.nodeSelector"
MAX_VALUE = 128  # characters of a fix's value in the status; the patch has all of it


def admission_changes(deployment: LLMDeployment, facts: Facts) -> Iterator[Change]:
    """Yield the edits that include each group of nodes which labels and taints alone keep pods from.

    A label that the chart's pod defaults select by is not the spec's to change.
    """
    template = spec_of(deployment).get("podTemplate", {}).get("spec", {})
    given, selector = template.get("tolerations", []), template.get("nodeSelector", {})
    for group in _groups(facts):
        why = group.why
        if not group.gpus or not (why.tolerations or why.selected_by) or not selector.keys() >= {*why.selected_by}:
            continue
        values: dict[str, Any] = {}
        fields: list[tuple[str, str]] = []
        if why.selected_by:
            kept = {key: value for key, value in selector.items() if key not in why.selected_by}
            values["podTemplate__spec__nodeSelector"] = kept or None
            fields.append((NODE_SELECTOR, f"without {' and '.join(why.selected_by)}"[:MAX_VALUE]))
        if why.tolerations:
            values["podTemplate__spec__tolerations"] = [*given, *(_toleration(*one) for one in why.tolerations)]
            fields.append((TOLERATIONS, " and ".join(_words(*one) for one in why.tolerations)[:MAX_VALUE]))
        if (changed := edit(deployment, facts, **values)) is not None:
            yield Change(tuple(fields), changed.deployment, with_group(facts, group))


def _groups(facts: Facts) -> tuple[LeftOut, ...]:
    """Those of all GPUs, taken or not: what is refused would not fit on free ones either."""
    everything = facts.capacity or facts.inventory
    if everything is not None:
        return everything.refused
    return facts.unknown_gpus.left_out if facts.unknown_gpus is not None else ()


def _toleration(key: str, value: str, effect: str) -> dict[str, Any]:
    same = {"operator": "Equal", "value": value} if value else {"operator": "Exists"}
    return {"key": key, **same, "effect": effect}


def _words(key: str, value: str, effect: str) -> str:
    return f"{key}{f'={value}' if value else ''}:{effect}"
