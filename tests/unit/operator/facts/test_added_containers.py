"""A Job into whose pod a webhook put containers is judged by the end of its own."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.facts.job_attempts import JobWork, next_job_step
from millstream_operator.rendering.names import ATTEMPT_LABEL

Manifest = dict[str, Any]
UNDER_WAY = Diagnosis(Reason.INSPECTING, "The model is inspected.")
WORK = JobWork(
    "inspect", "The inspection of the model", UNDER_WAY, Reason.DOWNLOAD_FAILED, lambda message: {"it": message}
)
NOW, LATER = "2026-01-01T00:00:05Z", "2026-01-01T00:00:21Z"  # own container ended at 10 s; the first delay is 10 s
ENDED_AT = "2026-01-01T00:00:10Z"
RUNS: Manifest = {"state": {"running": {}}}
FAILED: Manifest = {"terminated": {"exitCode": 1, "finishedAt": ENDED_AT, "message": ""}}


def job(attempt: int = 1, **status: Any) -> Manifest:
    metadata = {
        "uid": f"job-{attempt}",
        "name": f"inspect-{attempt}",
        "labels": {ATTEMPT_LABEL: str(attempt)},
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return {"metadata": metadata, "status": status}


def pod(own: Manifest, *added: Manifest, attempt: int = 1, init: tuple[Manifest, ...] = (), **spec: Any) -> Manifest:
    return {
        "metadata": {"ownerReferences": [{"uid": f"job-{attempt}"}]},
        "spec": {"nodeName": "n", **spec},
        "status": {
            "phase": "Running",
            "containerStatuses": [*added, {"name": "inspect", "state": own}],
            "initContainerStatuses": [*init],
        },
    }


PROXY, AGENT = {"name": "istio-proxy", **RUNS}, {"name": "agent", **RUNS}
NATIVE: Manifest = {"initContainers": [{"name": "istio-proxy", "restartPolicy": "Always"}]}


@pytest.mark.parametrize("added", [(PROXY,), (PROXY, AGENT)])
def test_a_sidecar_that_never_ends_delays_no_attempt(added: tuple[Manifest, ...]) -> None:
    failed = pod(FAILED, *added)
    early = next_job_step(WORK, [job()], [failed], "2026-01-01T00:00:14Z")
    assert (early.start, early.recheck_seconds) == (None, 6.0), "10 + 10 - 14"
    assert early.problem is not None
    assert early.problem.reason is Reason.DOWNLOAD_FAILED
    assert next_job_step(WORK, [job()], [failed], LATER).start == 2


def test_the_job_that_a_sidecar_keeps_running_is_deleted_once_the_next_one_exists() -> None:
    """Its pod holds what it asked for; a Job that has ended holds nothing, and its reason is shown meanwhile."""
    pods = [pod(FAILED, PROXY), pod({"running": {}}, PROXY, attempt=2)]
    step = next_job_step(WORK, [job(), job(2)], pods, LATER)
    assert [one["metadata"]["name"] for one in step.to_delete] == ["inspect-1"]
    ended = job(conditions=[{"type": "Failed", "status": "True", "lastTransitionTime": ENDED_AT}])
    step = next_job_step(WORK, [ended, job(2)], pods, LATER)
    assert step.to_delete == []
    assert step.problem is not None
    assert step.problem.reason is Reason.DOWNLOAD_FAILED


@pytest.mark.parametrize("code", [0, 3])
def test_an_answer_counts_whatever_the_sidecar_does(code: int) -> None:
    done = {"terminated": {"exitCode": 0, "finishedAt": ENDED_AT, "message": "shape"}}
    for proxy in (RUNS, {"state": {"terminated": {"exitCode": code}}}):
        step = next_job_step(WORK, [job()], [pod(done, {"name": "istio-proxy", **proxy})], NOW)
        assert step.answer == {"it": "shape"}


def test_a_native_sidecar_that_the_kubelet_ends_fails_nothing() -> None:
    done = {"terminated": {"exitCode": 0, "finishedAt": ENDED_AT, "message": "shape"}}
    proxy = {"name": "istio-proxy", "state": {"terminated": {"exitCode": 143}}}
    assert next_job_step(WORK, [job()], [pod(done, init=(proxy,), **NATIVE)], NOW).answer == {"it": "shape"}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}, Reason.IMAGE_PULL_FAILED),
        ({"waiting": {"reason": "CrashLoopBackOff"}}, Reason.CONTAINER_CRASHED),
        ({"waiting": {"reason": "CreateContainerConfigError"}}, Reason.CONTAINER_CONFIG_INVALID),
    ],
)
def test_an_added_container_that_keeps_ours_from_starting_is_named(state: Manifest, reason: Reason) -> None:
    waits = pod({"waiting": {"reason": "PodInitializing"}}, init=({"name": "istio-proxy", "state": state},), **NATIVE)
    problem = next_job_step(WORK, [job()], [waits], NOW).problem
    assert problem is not None
    assert problem.reason is reason
    assert "istio-proxy" in problem.message
    init = ({"name": "base-fetch-model", "image": "ours", "state": state},)
    ours = next_job_step(WORK, [job()], [pod({"waiting": {}}, init=init)], NOW).problem
    assert ours is None or "not the operator's" not in ours.message
    runs = pod({"running": {}}, {"name": "istio-proxy", "state": state})
    assert next_job_step(WORK, [job()], [runs], NOW).problem == UNDER_WAY, "ours runs, and ends by itself"
