"""What cannot wait: a spec that nothing was done about, and a child that somebody made, edited or deleted."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import CONFIG_MAP, DEPLOYMENT, JOB, LLM_DEPLOYMENT, POD, SERVICE, Kind
from millstream_operator.queue.priority import can_wait, was_applied

Manifest = dict[str, Any]


def owner(generation: int = 1, observed: int = 1, planned: str = "True") -> Manifest:
    conditions = [{"type": "Planned", "status": planned}]
    return {
        "metadata": {"generation": generation},
        "status": {"observedGeneration": observed, "conditions": conditions},
    }


def child(generation: int | None = None) -> Manifest:
    return {"metadata": {} if generation is None else {"generation": generation}}


def test_a_spec_was_applied_when_it_was_planned_as_it_is_now() -> None:
    assert was_applied(owner(), None)
    assert not was_applied(owner(generation=2), child()), "changed since"
    assert not was_applied(owner(planned="False"), child()), "waits for its plan"
    assert not was_applied(None, None), "not known"


def test_before_there_is_a_status_the_workload_decides() -> None:
    new = {"metadata": {"generation": 1}, "status": {"observedGeneration": -1}}
    assert not was_applied(new, None)
    assert was_applied(new, child())


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [(POD, None, child()), (POD, child(), child()), (DEPLOYMENT, child(3), child(3))],
)
def test_progress_can_wait(kind: Kind, before: Manifest | None, after: Manifest) -> None:
    assert can_wait(kind, before, after)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (LLM_DEPLOYMENT, child(1), child(1)),
        (JOB, child(1), child(1)),
        (DEPLOYMENT, child(3), child(4)),
        (DEPLOYMENT, None, child(1)),
        (SERVICE, child(), child()),
        (CONFIG_MAP, child(), child()),
    ],
)
def test_edits_cannot_wait(kind: Kind, before: Manifest | None, after: Manifest) -> None:
    assert not can_wait(kind, before, after)
