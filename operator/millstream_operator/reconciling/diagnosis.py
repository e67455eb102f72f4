"""Why a pod does not serve, as one stable reason and one sentence. Pure functions over pods as the API gives them.

A pod tells in four places, looked at in the order in which a pod lives: the scheduler's condition, why a container
waits, how a container ended last (with what the runtime itself wrote there), and whether it was evicted. "See the
pod's logs" is never the answer: the runtime's own last error is in the termination message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from millstream_operator.planning.plan import GPU_RESOURCE
from millstream_operator.reconciling.reasons import Reason
from millstream_operator.rendering.names import FETCH_CONTAINER, RUNTIME_CONTAINER

Pod = dict[str, Any]

PULL_FAILURES = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
CONFIG_FAILURES = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
KILLED = (137, 143)  # 128 + SIGKILL, 128 + SIGTERM
MESSAGE_LIMIT_CHARACTERS = 1000
# The most telling first: what a person can act on, then what may pass.
ORDER = (
    Reason.INVALID_CONFIG,
    Reason.CHECKPOINT_INVALID,
    Reason.DOWNLOAD_UNAUTHORIZED,
    Reason.DISK_FULL,
    Reason.DOWNLOAD_FAILED,
    Reason.UNSUPPORTED_BY_RUNTIME,
    Reason.OUT_OF_MEMORY,
    Reason.PORT_IN_USE,
    Reason.RUNTIME_CRASHED,
    Reason.WARMUP_STALLED,
    Reason.CONTAINER_CONFIG_INVALID,
    Reason.IMAGE_PULL_FAILED,
    Reason.VOLUME_PENDING,
    Reason.INSUFFICIENT_GPU,
    Reason.UNSCHEDULABLE,
    Reason.EVICTED,
)
# The scheduler's words for a claim that is unbound, missing, going, taken by another pod, or bound to a lost volume.
_VOLUME = re.compile(r"persistent ?volume|\bpvc", re.IGNORECASE)
_RUNTIME_REASONS = frozenset(str(reason) for reason in ORDER)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    reason: Reason
    message: str


def diagnose(pods: Iterable[Pod]) -> Diagnosis | None:
    """The most telling diagnosis among pods; None when none of them has a failure to tell."""
    found = [diagnosis for pod in pods if (diagnosis := diagnose_pod(pod)) is not None]
    return min(found, key=lambda diagnosis: (ORDER.index(diagnosis.reason), diagnosis.message), default=None)


def diagnose_pod(pod: Pod, name: str = RUNTIME_CONTAINER) -> Diagnosis | None:
    """What keeps one pod's container from running. One that serves, that is going, or merely starts has nothing."""
    status = pod.get("status", {})
    if pod["metadata"].get("deletionTimestamp") or _condition(status, "Ready").get("status") == "True":
        return None
    if status.get("reason") == "Evicted":
        return Diagnosis(Reason.EVICTED, _sentence(f"The node evicted the pod: {status.get('message', '')}"))
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return _unschedulable(scheduled.get("message", ""))
    if (fetching := _fetch_status(status)) is not None and (found := _fetch_failure(fetching)) is not None:
        return found
    container = _container_status(status, name)
    waiting = container.get("state", {}).get("waiting", {})
    if waiting.get("reason") in PULL_FAILURES:
        return _image_pull(pod, name, waiting)
    if waiting.get("reason") in CONFIG_FAILURES:
        said = f"The container cannot be made: {waiting.get('message') or waiting['reason']}"
        return Diagnosis(Reason.CONTAINER_CONFIG_INVALID, _sentence(said))
    ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated")
    return _ended(ended, container) if ended else None


def _fetch_failure(container: dict[str, Any]) -> Diagnosis | None:
    """Why the download before the runtime failed last, in its own words where it left some."""
    waiting = container.get("state", {}).get("waiting", {})
    if waiting.get("reason") in CONFIG_FAILURES:
        said = f"The model's download cannot be started: {waiting.get('message') or waiting['reason']}"
        return Diagnosis(Reason.CONTAINER_CONFIG_INVALID, _sentence(said))
    ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated")
    if ended is None or ended.get("exitCode") == 0:
        return None
    if told := told_by_container(ended.get("message", "")):
        return told
    return Diagnosis(Reason.DOWNLOAD_FAILED, f"The model's download ended with exit code {ended.get('exitCode')}.")


def _unschedulable(message: str) -> Diagnosis:
    if f"Insufficient {GPU_RESOURCE}" in message:
        return Diagnosis(Reason.INSUFFICIENT_GPU, _sentence(f"No node has a free GPU: {message}"))
    if _VOLUME.search(message):
        return Diagnosis(Reason.VOLUME_PENDING, _sentence(f"A volume of the pod is not there yet: {message}"))
    return Diagnosis(Reason.UNSCHEDULABLE, _sentence(f"No node takes the pod: {message}"))


def _image_pull(pod: Pod, name: str, waiting: dict[str, Any]) -> Diagnosis:
    """ErrImagePull and ImagePullBackOff take turns; told in the same words, the status does not change with them."""
    image = next((c["image"] for c in pod["spec"]["containers"] if c["name"] == name), "?")
    detail = waiting.get("message") or ""
    detail = re.sub(r'^Back-off pulling image "[^"]*"(: )?', "", detail)
    detail = re.sub(r"^(ErrImagePull|ImagePullBackOff): ", "", detail)
    detail = re.sub(r"^rpc error: code = \w+ desc = ", "", detail)
    detail = re.sub(r"\d+\.\d+\.\d+\.\d+:\d+->", "", detail)  # our own side of a connection has a new port each time
    return Diagnosis(
        Reason.IMAGE_PULL_FAILED,
        _sentence(f"The image {image} cannot be pulled{f': {detail}' if detail else ''}"),
    )


def _ended(ended: dict[str, Any], container: dict[str, Any]) -> Diagnosis | None:
    code = ended.get("exitCode")
    if code == 0:
        return None
    if told := told_by_container(ended.get("message", "")):
        return told
    if ended.get("reason") == "OOMKilled":
        return Diagnosis(
            Reason.OUT_OF_MEMORY,
            "The kernel killed the runtime because it passed its memory limit; raise "
            "podTemplate.spec.containers[runtime].resources.limits.memory, or lower engine.maxNumSeqs or "
            "engine.maxModelLen.",
        )
    if code in KILLED and not container.get("started"):
        return Diagnosis(
            Reason.WARMUP_STALLED,
            "The model was not ready within warmup.timeout, so the kubelet restarted the pod; raise warmup.timeout "
            "or give the pod more CPU.",
        )
    last_words = ended.get("message", "").strip().splitlines()
    said = f": {last_words[-1]}" if last_words else ""
    return Diagnosis(Reason.RUNTIME_CRASHED, _sentence(f"The runtime ended with exit code {code}{said}"))


def told_by_container(message: str) -> Diagnosis | None:
    """What the runtime, or a download, wrote to its termination log (`millstream_runtime.errors`)."""
    try:
        told = json.loads(message)
        reason, sentence = told["reason"], told["message"]
    except (ValueError, TypeError, KeyError):
        return None
    if not isinstance(sentence, str):
        return None
    known = Reason(reason) if reason in _RUNTIME_REASONS else Reason.RUNTIME_CRASHED
    return Diagnosis(known, _sentence(sentence))


def diagnose_replica_failure(message: str) -> Diagnosis:
    """Why pods could not even be created, from the Deployment's ReplicaFailure condition."""
    # 'pods "demo-7d9c-x2x8k" is forbidden': the name is another at each try
    stable = re.sub(r'pods "[^"]*"', "pods", message)
    reason = Reason.QUOTA_EXCEEDED if "exceeded quota" in message else Reason.ADMISSION_DENIED
    return Diagnosis(reason, _sentence(f"Pods cannot be created: {stable}"))


def _fetch_status(status: dict[str, Any]) -> dict[str, Any] | None:
    statuses = status.get("initContainerStatuses") or []
    return next((one for one in statuses if one.get("name") == FETCH_CONTAINER), None)


def _container_status(status: dict[str, Any], name: str) -> dict[str, Any]:
    statuses = status.get("containerStatuses") or []
    return next((one for one in statuses if one.get("name") == name), {})


def _condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((one for one in status.get("conditions") or [] if one.get("type") == kind), {})


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    if len(text) > MESSAGE_LIMIT_CHARACTERS:
        text = text[: MESSAGE_LIMIT_CHARACTERS - 1] + "…"
    return text if text.endswith((".", "…")) else f"{text}."
