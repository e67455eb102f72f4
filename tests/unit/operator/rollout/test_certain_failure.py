"""When a new revision is given up: not while it may still get ready, and not an hour after it no longer can."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.rollout.certain_failure import certain_failure
from millstream_operator.workloads.deployments import DEPLOYMENTS
from millstream_operator.workloads.workload import state_of

Manifest = dict[str, Any]
DIGEST = "new"


def workload(**status: Any) -> Manifest:
    template = {"metadata": {"labels": {"millstream.dev/revision": DIGEST}}}
    return {
        "metadata": {"generation": 2},
        "spec": {"template": template},
        "status": {"observedGeneration": 2} | status,
    }


def pod(*, digest: str = DIGEST, **status: Any) -> Manifest:
    labels = {"millstream.dev/revision": digest}
    return {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "runtime", "image": "x"}]},
        "status": status,
    }


def crashed(restarts: int, reason: str | None = None) -> Manifest:
    message = json.dumps({"reason": reason, "message": "It is so."}) if reason else "Killed"
    ended = {"terminated": {"exitCode": 1, "message": message}}
    return pod(containerStatuses=[{"name": "runtime", "restartCount": restarts, "lastState": ended}])


def fetching(restarts: int, reason: str) -> Manifest:
    ended = {"terminated": {"exitCode": 1, "message": json.dumps({"reason": reason, "message": "It is so."})}}
    return pod(initContainerStatuses=[{"name": "fetch-model", "restartCount": restarts, "lastState": ended}])


def pulling(detail: str) -> Manifest:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": detail}}
    return pod(containerStatuses=[{"name": "runtime", "restartCount": 0, "state": waiting}])


NO_GPU = pod(
    conditions=[
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
        }
    ]
)
LATE = {"conditions": [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]}
DENIED = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": "violates PodSecurity"}]}
QUOTA = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpu"}]}

CASES: dict[str, tuple[Manifest | None, list[Manifest], str | None]] = {
    "no Deployment yet": (None, [], None),
    "pods that start": (workload(), [pod()], None),
    "no model folder": (workload(), [crashed(0, "CheckpointInvalid")], "CheckpointInvalid"),
    "no right to the model": (workload(), [fetching(0, "DownloadUnauthorized")], "DownloadUnauthorized"),
    "one crash": (workload(), [crashed(1)], None),
    "three crashes": (workload(), [crashed(3)], "RuntimeCrashed"),
    "out of memory twice": (workload(), [crashed(2, "OutOfMemory")], None),
    "out of memory again and again": (workload(), [crashed(3, "OutOfMemory")], "OutOfMemory"),
    "a hub that is away": (workload(), [fetching(9, "DownloadFailed")], None),
    "no such image": (workload(), [pulling("failed to resolve reference: registry/x: not found")], "ImagePullFailed"),
    "no right to the image": (workload(), [pulling("401 Unauthorized")], "ImagePullFailed"),
    "a registry that is away": (workload(), [pulling("dial tcp: connection refused")], None),
    "no free GPU": (workload(), [NO_GPU], None),
    "no free GPU, and too late": (workload(**LATE), [NO_GPU], "InsufficientGPU"),
    "too late, for an unknown reason": (workload(**LATE), [pod()], "ProgressDeadlineExceeded"),
    "too late, said of an older generation": (workload(observedGeneration=1, **LATE), [pod()], None),
    "pods are not admitted": (workload(**DENIED), [], "AdmissionDenied"),
    "a quota is full": (workload(**QUOTA), [], None),
    "an old pod fails": (workload(), [pod(digest="old", **crashed(9)["status"])], None),
    "one of two": (workload(), [pod(), crashed(0, "InvalidConfig")], "InvalidConfig"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_certain(name: str) -> None:
    live, pods, reason = CASES[name]
    found = certain_failure(DIGEST, state_of(DEPLOYMENTS, live), pods)
    assert (str(found.reason) if found is not None else None) == reason


def test_too_late_says_which_fields_give_more_time() -> None:
    found = certain_failure(DIGEST, state_of(DEPLOYMENTS, workload(**LATE)), [pod()])
    assert found is not None
    assert "raise rollout.progressDeadline and warmup.timeout" in found.message


def test_the_name_of_an_image_is_no_evidence() -> None:
    """It may hold any word."""
    name = "registry.example/forbidden/denied:1"
    one = pulling(f'failed to resolve reference "{name}": dial tcp: connection refused')
    one["spec"]["containers"][0]["image"] = name
    assert certain_failure(DIGEST, DEPLOYMENTS.read(workload()), [one]) is None
