"""What a pod's manifest says, by name: its conditions, its containers, its budgets. Pure reading, no judgement."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from millstream_operator.rendering.names import (
    DRAFT_FETCH_CONTAINER,
    FETCH_CONTAINER,
    LEADER,
    REVISION_LABEL,
    ROLE_LABEL,
    RUNTIME_CONTAINER,
)

Pod = dict[str, Any]
ENDED = ("Failed", "Succeeded")
SOURCE_FLAGS = ("--hugging-face=", "--image=")  # of `millstream fetch`


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


def has_ended(pod: Pod) -> bool:
    """It was evicted, say. Its object stays, and its controller does not count it: it makes another pod."""
    return pod.get("status", {}).get("phase") in ENDED


def is_leader(pod: Pod) -> bool:
    """The pod of a replica that answers requests."""
    return bool(pod["metadata"].get("labels", {}).get(ROLE_LABEL) == LEADER)


def digest_of_pod(pod: Pod) -> str | None:
    """The digest of the revision that a pod, or a pod template, belongs to."""
    found: str | None = pod.get("metadata", {}).get("labels", {}).get(REVISION_LABEL)
    return found


def runtime_status(pod: Pod) -> dict[str, Any]:
    """The status of the container that serves, or an empty one."""
    return _named(pod.get("status", {}).get("containerStatuses"), RUNTIME_CONTAINER)


def fetch_status(pod: Pod) -> dict[str, Any]:
    """The status of the download before the runtime, or an empty one."""
    return _named(pod.get("status", {}).get("initContainerStatuses"), FETCH_CONTAINER)


def draft_fetch_status(pod: Pod) -> dict[str, Any]:
    """The status of the draft model's download, which follows the model's, or an empty one."""
    return _named(pod.get("status", {}).get("initContainerStatuses"), DRAFT_FETCH_CONTAINER)


def download_statuses(pod: Pod) -> list[dict[str, Any]]:
    """The statuses of the downloads before the runtime, in their order; an empty one where there is none."""
    return [fetch_status(pod), draft_fetch_status(pod)]


def draft_source_of(pod: Pod) -> str:
    """The draft model that the pod downloads, as its download names it; "" where it downloads none."""
    args = _named(pod.get("spec", {}).get("initContainers"), DRAFT_FETCH_CONTAINER).get("args") or ()
    named = [str(word).partition("=")[2] for word in args if str(word).startswith(SOURCE_FLAGS)]
    return next(iter(named), "")


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
