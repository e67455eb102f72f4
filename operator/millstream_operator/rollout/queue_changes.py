"""When another Kueue queue is taken over: only while no pod is ready, as Kueue itself demands. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.rendering.kueue import queue_labels
from millstream_operator.rollout.revisions import newest_first, read_pin
from millstream_operator.workloads.workload import WorkloadState

Manifest = dict[str, Any]


def waits_for_another_queue(owner: LLMDeployment, records: Sequence[Manifest], state: WorkloadState | None) -> bool:
    """Whether the newest plan is of another queue than the label names, and no pod is ready."""
    wanted = queue_labels(owner.metadata.labels)
    if not wanted or (state is not None and state.counts.get("readyReplicas", 0)):
        return False
    newest = read_pin(newest_first(records)[0]) if records else None
    return newest is not None and queue_labels(newest.revision.template["metadata"].get("labels") or {}) != wanted
