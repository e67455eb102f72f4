"""Why pods do not serve: one stable reason and one sentence for all of them. Pure functions over pods of the API.

A pod is examined in the order of its life: whether its node still answers, whether the scheduler found one, why a
container waits, how a container ended last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millstream_operator.diagnosis.container_failures import diagnose_containers
from millstream_operator.diagnosis.diagnosis import Diagnosis, sentence
from millstream_operator.diagnosis.pod_facts import Pod, condition, is_ready, is_terminating
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.diagnosis.scheduling import diagnose_scheduling

# The most useful first: what a person can act on, then what may pass.
ORDER = (
    Reason.INVALID_CONFIG,
    Reason.API_KEYS_INVALID,
    Reason.CHECKPOINT_INVALID,
    Reason.DOWNLOAD_UNAUTHORIZED,
    Reason.DISK_FULL,
    Reason.DOWNLOAD_FAILED,
    Reason.UNSUPPORTED_BY_RUNTIME,
    Reason.OUT_OF_MEMORY,
    Reason.NCCL_FAILED,
    Reason.PORT_IN_USE,
    Reason.RUNTIME_CRASHED,
    Reason.WARMUP_STALLED,
    Reason.CONTAINER_CRASHED,
    Reason.CONTAINER_CONFIG_INVALID,
    Reason.IMAGE_PULL_FAILED,
    Reason.VOLUME_PENDING,
    Reason.QUOTA_EXCEEDED,
    Reason.INSUFFICIENT_GPU,
    Reason.UNSCHEDULABLE,
    Reason.NODE_LOST,
    Reason.EVICTED,
)
_EVICTED_REASONS = frozenset({"Evicted", "Preempting"})
_NODE_GONE = frozenset({"NodeLost", "NodeShutdown", "Terminated", "Shutdown"})
# The kubelet's own admission: another pod took the resources after the scheduler had chosen the node.
_NODE_REFUSED = frozenset({"UnexpectedAdmissionError", "NodeAffinity", "TopologyAffinityError"})


def diagnose(pods: Iterable[Pod], plan: Mapping[str, Any] | None = None, phase: str | None = None) -> Diagnosis | None:
    """Return the most useful diagnosis among pods; None when none of them fails.

    `plan` is the pinned `status.plan`, `phase` where the warm-up was seen last.
    """
    found = [one for pod in pods if (one := diagnose_pod(pod, plan or {}, phase)) is not None]
    return min(found, key=lambda one: (ORDER.index(one.reason), one.message), default=None)


def diagnose_pod(pod: Pod, plan: Mapping[str, Any] | None = None, phase: str | None = None) -> Diagnosis | None:
    """Return what keeps one pod from serving; None for a pod that is ready, terminating or merely starting."""
    if is_terminating(pod) or is_ready(pod):
        return None
    return diagnose_node(pod) or diagnose_scheduling(pod) or diagnose_containers(pod, plan or {}, phase)


def diagnose_node(pod: Pod) -> Diagnosis | None:
    """Return what the node did to a pod, or that the node no longer answers."""
    status, node = pod.get("status", {}), pod.get("spec", {}).get("nodeName", "?")
    reason, message = status.get("reason") or "", status.get("message") or ""
    if reason in _EVICTED_REASONS:
        return Diagnosis(Reason.EVICTED, sentence(f"The node evicted the pod: {message}"))
    if reason in _NODE_GONE or _is_silent(pod):
        return Diagnosis(
            Reason.NODE_LOST,
            f"The node {node} of the pod does not answer, or is shutting down. See kubectl describe node {node}.",
        )
    if reason in _NODE_REFUSED or reason.startswith("OutOf"):
        return Diagnosis(Reason.UNSCHEDULABLE, sentence(f"The node {node} did not take the pod: {message or reason}"))
    return None


def _is_silent(pod: Pod) -> bool:
    """Return whether all containers were last ready and Ready is False: only the node controller does that."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return (
        condition(pod, "ContainersReady").get("status") == "True"
        and condition(pod, "Ready").get("status") == "False"
        and not pod.get("spec", {}).get("readinessGates")
        and bool(statuses)
        and all(one.get("ready") for one in statuses)
    )
