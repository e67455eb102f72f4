"""More memory for a replica on a CPU, as an edit of the pod template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.change import Change, edit, spec_of
from millstream_operator.planning.sizing.cpu_memory import memory_limit_bytes

MEMORY_LIMIT = "podTemplate.spec.containers[runtime].resources.limits.memory"
MAX_LIMIT_GIB = 2048


def memory_changes(deployment: LLMDeployment, facts: Facts) -> Iterator[Change]:
    """Yield larger memory limits, each half as large again as the one before."""
    gib = (memory_limit_bytes(deployment.spec) >> 30) + 1
    while gib <= MAX_LIMIT_GIB:
        if (change := _with_memory(deployment, facts, f"{gib}Gi")) is not None:
            yield change
        gib = max(gib + 1, gib * 3 // 2)


def _with_memory(deployment: LLMDeployment, facts: Facts, limit: str) -> Change | None:
    """The whole list of containers with another limit: a merge patch replaces lists."""
    template = spec_of(deployment).get("podTemplate", {}).get("spec", {})
    containers: list[dict[str, Any]] = template.get("containers") or [{"name": "runtime"}]
    containers[0].setdefault("resources", {}).setdefault("limits", {})["memory"] = limit
    change = edit(deployment, facts, podTemplate__spec__containers=containers)
    return Change(((MEMORY_LIMIT, limit),), change.deployment, facts) if change is not None else None
