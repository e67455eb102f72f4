"""Tolerations with which nodes that are left out count, as an edit of the pod template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.inventory.left_out import LeftOut
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.change import Change, edit, spec_of
from millstream_operator.planning.left_out_nodes import with_group

TOLERATIONS = "podTemplate.spec.tolerations"
MAX_VALUE = 128  # characters of a fix's value in the status; the patch has all of it


def admission_changes(deployment: LLMDeployment, facts: Facts) -> Iterator[Change]:
    """Yield the tolerations of each group of nodes that nothing else keeps pods from."""
    given = spec_of(deployment).get("podTemplate", {}).get("spec", {}).get("tolerations", [])
    for group in _groups(facts):
        added = [_toleration(*one) for one in group.why.tolerations]
        if not added or not group.gpus:
            continue
        changed = edit(deployment, facts, podTemplate__spec__tolerations=[*given, *added])
        if changed is not None:
            words = " and ".join(_words(*one) for one in group.why.tolerations)
            yield Change(((TOLERATIONS, words[:MAX_VALUE]),), changed.deployment, with_group(facts, group))


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
