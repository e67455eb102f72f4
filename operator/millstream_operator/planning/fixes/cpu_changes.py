"""More memory for a replica on a CPU, as an edit of the pod template."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.planning.choices.kv_layout import planned_cpu_memory
from millstream_operator.planning.choices.rounded_weights import as_loaded
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.change import Change, edit, spec_of
from millstream_operator.planning.fixes.least_change import change_of
from millstream_operator.planning.requires import usable_draft_shape
from millstream_operator.planning.sizing.cpu_memory import shortest_length

MEMORY_LIMIT = "podTemplate.spec.containers[runtime].resources.limits.memory"
GIB = 1 << 30


def memory_changes(deployment: LLMDeployment, facts: Facts) -> Iterator[Change]:
    """Yield the smallest memory limit in whole GiB with which the model and one request fit."""
    if facts.shape is None:
        return
    draft = usable_draft_shape(deployment.spec, facts)
    shape = as_loaded(deployment.spec, facts.shape, facts.runtime)
    memory = planned_cpu_memory(deployment.spec, shape, facts, draft)
    wanted_bytes = memory.limit_for(shortest_length(deployment.spec, shape))
    if (change := _with_memory(deployment, facts, f"{-(-wanted_bytes // GIB)}Gi")) is not None:
        yield replace(change, step=change_of(memory.ledger.usable_bytes, wanted_bytes))


def _with_memory(deployment: LLMDeployment, facts: Facts, limit: str) -> Change | None:
    """The whole list of containers with another limit: a merge patch replaces lists."""
    template = spec_of(deployment).get("podTemplate", {}).get("spec", {})
    containers: list[dict[str, Any]] = template.get("containers") or [{"name": "runtime"}]
    containers[0].setdefault("resources", {}).setdefault("limits", {})["memory"] = limit
    change = edit(deployment, facts, podTemplate__spec__containers=containers)
    return Change(((MEMORY_LIMIT, limit),), change.deployment, facts) if change is not None else None
