"""What an LLMDeployment is waiting for, in lines. Pure: reads objects of the API server.

Planned ✓   Available …   ModelReady …     the operator's conditions
pod demo-5c9: Running, not ready           the kubelet's view
  pulling localhost:5001/…                 the pod's last event
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

JSON = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DeploymentProgress:
    """The state of a deployment. `lines` say what it waits for, the most specific last."""

    ready: bool
    failure: str | None  # one sentence, if waiting will not help
    lines: tuple[str, ...]


def progress(deployment: JSON, pods: Sequence[JSON], events: Sequence[JSON]) -> DeploymentProgress:
    """Read the conditions of the current generation, the pods and their events."""
    generation = deployment["metadata"]["generation"]
    status = deployment.get("status") or {}
    current = status.get("observedGeneration") == generation
    conditions = {item["type"]: item for item in status.get("conditions") or []} if current else {}
    ready = _is_true(conditions, "Ready")
    stalled = conditions.get("Stalled", {})
    failure = None
    if stalled.get("status") == "True":
        failure = f"{stalled.get('reason', 'Stalled')}: {stalled.get('message', '')}"
    lines = [_summary(conditions) if conditions else "the operator has not seen it yet"]
    if not ready:
        lines += [line for pod in pods for line in _pod_lines(pod, events)]
    return DeploymentProgress(ready, failure, tuple(lines))


def _summary(conditions: dict[str, JSON]) -> str:
    marks = [f"{kind} {_mark(conditions[kind])}" for kind in _order(conditions)]
    ready = conditions.get("Ready", {})
    why = "" if ready.get("status") == "True" else f"   {ready.get('reason', '')}: {ready.get('message', '')}"
    return "   ".join(marks) + why


def _order(conditions: dict[str, JSON]) -> list[str]:
    """The conditions on the path to Ready; Ready's message includes the others."""
    return [kind for kind in ("Planned", "Available", "ModelReady", "Ready") if kind in conditions]


def _mark(condition: JSON) -> str:
    return "✓" if condition.get("status") == "True" else "…"


def _pod_lines(pod: JSON, events: Sequence[JSON]) -> list[str]:
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    containers = status.get("containerStatuses") or []
    waiting = [state["waiting"] for item in containers if (state := item.get("state") or {}).get("waiting")]
    facts = [status.get("phase", "Unknown")]
    facts += [item["reason"] for item in waiting if item.get("reason")]
    if status.get("phase") == "Running" and not all(item.get("ready") for item in containers):
        facts.append("not ready")
    if restarts := sum(item.get("restartCount", 0) for item in containers):
        facts.append(f"{restarts} restarts")
    lines = [f"pod {name}: {', '.join(facts)}"]
    if status.get("phase") == "Pending" and (message := _last_event(pod, events)):
        lines.append(f"  {message}")
    return lines


def _last_event(pod: JSON, events: Sequence[JSON]) -> str:
    about = [event for event in events if event.get("involvedObject", {}).get("uid") == pod["metadata"]["uid"]]
    if not about:
        return ""
    last = max(about, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    return " ".join(str(last.get("message", "")).split())


def _is_true(conditions: dict[str, JSON], kind: str) -> bool:
    return conditions.get(kind, {}).get("status") == "True"
