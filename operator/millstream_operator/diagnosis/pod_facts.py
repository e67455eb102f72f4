"""What a pod's manifest says, by name: its conditions, its containers, its budgets. Pure reading, no judgement."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from millstream_operator.rendering.names import FETCH_CONTAINER, LEADER, ROLE_LABEL, RUNTIME_CONTAINER

Pod = dict[str, Any]


def condition(pod: Pod, kind: str) -> dict[str, Any]:
    """A condition of a pod, or an empty one."""
    return next((one for one in pod.get("status", {}).get("conditions") or [] if one.get("type") == kind), {})


def is_ready(pod: Pod) -> bool:
    return bool(condition(pod, "Ready").get("status") == "True")


def is_terminating(pod: Pod) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def is_scheduled(pod: Pod) -> bool:
    """A node was chosen for it."""
    return bool(pod.get("spec", {}).get("nodeName")) or condition(pod, "PodScheduled").get("status") == "True"


def is_leader(pod: Pod) -> bool:
    """The pod of a replica that answers requests."""
    return bool(pod["metadata"].get("labels", {}).get(ROLE_LABEL) == LEADER)


def runtime_status(pod: Pod) -> dict[str, Any]:
    """The status of the container that serves, or an empty one."""
    return _named(pod.get("status", {}).get("containerStatuses"), RUNTIME_CONTAINER)


def fetch_status(pod: Pod) -> dict[str, Any]:
    """The status of the download before the runtime, or an empty one."""
    return _named(pod.get("status", {}).get("initContainerStatuses"), FETCH_CONTAINER)


def runtime_container(pod: Pod) -> dict[str, Any]:
    return _named(pod.get("spec", {}).get("containers"), RUNTIME_CONTAINER)


def init_containers_are_done(pod: Pod) -> bool:
    """No init container is left to run; also true of a pod that has none."""
    statuses = pod.get("status", {}).get("initContainerStatuses") or []
    return all(one.get("state", {}).get("terminated", {}).get("exitCode") == 0 for one in statuses)


def asked_amount(pod: Pod, resource: str) -> str:
    """What the runtime asks of a resource, as it stands in the pod: "4", "16Gi"; "" where it asks for none."""
    resources = runtime_container(pod).get("resources") or {}
    amount = (resources.get("requests") or {}).get(resource) or (resources.get("limits") or {}).get(resource)
    return str(amount) if amount is not None else ""


def warmup_budget_seconds(pod: Pod) -> float | None:
    """How long the kubelet waits for the pod's first readiness before it restarts it."""
    probe = runtime_container(pod).get("startupProbe")
    if not probe:
        return None
    return float(probe.get("failureThreshold", 3) * probe.get("periodSeconds", 10))


def claims(pod: Pod) -> list[str]:
    """Names of the PersistentVolumeClaims that it mounts."""
    volumes = pod.get("spec", {}).get("volumes") or []
    return [one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one]


def secrets(pod: Pod) -> list[str]:
    """Names of the Secrets that it mounts."""
    return [one["secret"]["secretName"] for one in pod.get("spec", {}).get("volumes") or [] if "secret" in one]


def seconds_between(before: object, after: object) -> float | None:
    """Between two RFC 3339 times; None where one of them is none."""
    first, second = parse_time(before), parse_time(after)
    return (second - first).total_seconds() if first is not None and second is not None else None


def parse_time(text: object) -> datetime.datetime | None:
    """An RFC 3339 time of the API; None for anything else."""
    try:
        found = datetime.datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return found if found is not None and found.tzinfo is not None else None


def _named(items: object, name: str) -> dict[str, Any]:
    for item in items if isinstance(items, list) else []:
        if isinstance(item, Mapping) and item.get("name") == name:
            return dict(item)
    return {}
