"""What the demo shows while it waits, from objects as the API server gives them."""

from __future__ import annotations

from typing import Any

from hack.demo.progress import progress


def deployment(*conditions: dict[str, str], observed: int = 1) -> dict[str, Any]:
    return {
        "metadata": {"name": "demo", "generation": 1},
        "status": {"observedGeneration": observed, "conditions": list(conditions)},
    }


def condition(kind: str, status: str, reason: str = "Because", message: str = "it is so.") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


PENDING = {
    "metadata": {"name": "demo-1", "uid": "u"},
    "status": {
        "phase": "Pending",
        "containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}, "ready": False}],
    },
}


def event(message: str, when: str, uid: str = "u") -> dict[str, Any]:
    return {"involvedObject": {"uid": uid}, "message": message, "lastTimestamp": when}


def test_before_the_operator_looked() -> None:
    seen = progress({"metadata": {"name": "demo", "generation": 1}}, [], [])
    assert not seen.ready
    assert seen.lines == ("the operator has not seen it yet",)


def test_an_older_generation_is_not_news() -> None:
    seen = progress(deployment(condition("Ready", "True"), observed=0), [], [])
    assert not seen.ready


def test_it_names_the_condition_and_what_the_pod_last_said() -> None:
    conditions = (condition("Planned", "True"), condition("Ready", "False", "Starting", "No pod is up yet."))
    events = [
        event("Pulling image", "2026-01-01T00:00:02Z"),
        event("Scheduled", "2026-01-01T00:00:01Z"),
        event("of another pod", "2026-01-01T00:00:09Z", uid="other"),
    ]
    seen = progress(deployment(*conditions), [PENDING], events)
    assert seen.lines == (
        "Planned ✓   Ready …   Starting: No pod is up yet.",
        "pod demo-1: Pending, ContainerCreating",
        "  Pulling image",
    )
    assert seen.failure is None


def test_ready_needs_no_more_lines() -> None:
    seen = progress(deployment(condition("Planned", "True"), condition("Ready", "True")), [PENDING], [])
    assert seen.ready
    assert seen.lines == ("Planned ✓   Ready ✓",)


def test_stalled_is_a_failure_with_its_reason() -> None:
    stalled = condition("Stalled", "True", "CheckpointInvalid", "/models/x has no config.json.")
    assert progress(deployment(stalled), [], []).failure == "CheckpointInvalid: /models/x has no config.json."
