"""A pod that fails is one reason and one sentence: never "see the logs", and never another sentence at each look."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.reconciling.diagnosis import (
    MESSAGE_LIMIT_CHARACTERS,
    ORDER,
    diagnose,
    diagnose_pod,
    diagnose_replica_failure,
)
from millstream_operator.reconciling.reasons import Reason
from millstream_runtime.errors import Reason as RuntimeReason
from millstream_runtime.errors import RuntimeFailure

Pod = dict[str, Any]
IMAGE = "registry.example.com/runtime:1"


def pod(*, conditions: dict[str, Any] | None = None, container: dict[str, Any] | None = None, **status: Any) -> Pod:
    """A pod with one status of its container `runtime`, and conditions given as type: rest."""
    return {
        "metadata": {"name": "demo-abc-1", "namespace": "team"},
        "spec": {"containers": [{"name": "sidecar", "image": "x"}, {"name": "runtime", "image": IMAGE}]},
        "status": {
            "conditions": [{"type": kind, **rest} for kind, rest in (conditions or {}).items()],
            "containerStatuses": [{"name": "runtime", **container}] if container else [],
        }
        | status,
    }


def unschedulable(message: str) -> Pod:
    return pod(conditions={"PodScheduled": {"status": "False", "reason": "Unschedulable", "message": message}})


def waiting(reason: str, message: str = "") -> Pod:
    return pod(container={"state": {"waiting": {"reason": reason, "message": message}}})


def ended(code: int, message: str = "", reason: str = "Error", **container: Any) -> Pod:
    terminated = {"exitCode": code, "message": message, "reason": reason}
    return pod(container={"state": {"terminated": terminated}, **container})


def crash_looping(code: int, message: str = "", **container: Any) -> Pod:
    return pod(
        container={
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting"}},
            "lastState": {"terminated": {"exitCode": code, "message": message, "reason": "Error"}},
            **container,
        }
    )


def report(reason: str, message: str) -> str:
    return json.dumps({"reason": reason, "message": message})


# name: (pod, reason, words of the message)
FAILURES: dict[str, tuple[Pod, Reason, list[str]]] = {
    "no node has room": (
        unschedulable("0/3 nodes are available: 3 Insufficient memory."),
        Reason.UNSCHEDULABLE,
        ["No node takes the pod", "Insufficient memory"],
    ),
    "an unbound claim": (
        unschedulable("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."),
        Reason.VOLUME_PENDING,
        ["unbound immediate PersistentVolumeClaims"],
    ),
    "no claim": (
        unschedulable('0/1 nodes are available: persistentvolumeclaim "models" not found.'),
        Reason.VOLUME_PENDING,
        ['"models" not found'],
    ),
    "a claim in use": (
        unschedulable(
            "0/1 nodes are available: 1 node has pod using PersistentVolumeClaim with the same name and "
            "ReadWriteOncePod access mode."
        ),
        Reason.VOLUME_PENDING,
        ["ReadWriteOncePod"],
    ),
    "no free GPU": (
        unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
        Reason.INSUFFICIENT_GPU,
        ["No node has a free GPU"],
    ),
    "image pull": (
        waiting("ErrImagePull", 'rpc error: code = NotFound desc = failed to pull "x": not found'),
        Reason.IMAGE_PULL_FAILED,
        [IMAGE, "not found"],
    ),
    "image pull, backing off": (
        waiting("ImagePullBackOff", 'Back-off pulling image "x": ErrImagePull: not found'),
        Reason.IMAGE_PULL_FAILED,
        [IMAGE, "cannot be pulled: not found."],
    ),
    "image name": (waiting("InvalidImageName"), Reason.IMAGE_PULL_FAILED, [IMAGE]),
    "a secret is missing": (
        waiting("CreateContainerConfigError", 'secret "tokens" not found'),
        Reason.CONTAINER_CONFIG_INVALID,
        ['secret "tokens" not found'],
    ),
    "no command": (
        waiting("RunContainerError", "exec: no such file"),
        Reason.CONTAINER_CONFIG_INVALID,
        ["exec: no such file"],
    ),
    "a reason without a message": (
        waiting("CreateContainerError"),
        Reason.CONTAINER_CONFIG_INVALID,
        ["CreateContainerError"],
    ),
    "the runtime's own word": (
        ended(1, report("CheckpointInvalid", "No config.json in /models/x")),
        Reason.CHECKPOINT_INVALID,
        ["No config.json in /models/x."],
    ),
    "the runtime's own word, crash-looping": (
        crash_looping(1, report("InvalidConfig", "--max-model-len is too long.")),
        Reason.INVALID_CONFIG,
        ["--max-model-len is too long."],
    ),
    "a newer runtime's word": (
        ended(1, report("SomethingNew", "The moon is full.")),
        Reason.RUNTIME_CRASHED,
        ["The moon is full."],
    ),
    "a word that only the operator may say": (
        ended(1, report("Ready", "I am fine.")),
        Reason.RUNTIME_CRASHED,
        ["I am fine."],
    ),
    "the runtime's word wins over the signal": (
        ended(137, report("OutOfMemory", "The weights need 8 GiB."), reason="OOMKilled"),
        Reason.OUT_OF_MEMORY,
        ["The weights need 8 GiB."],
    ),
    "killed by the kernel": (
        ended(137, reason="OOMKilled"),
        Reason.OUT_OF_MEMORY,
        ["resources.limits.memory", "engine.maxNumSeqs"],
    ),
    "killed before it was ready": (crash_looping(137, started=False), Reason.WARMUP_STALLED, ["warmup.timeout"]),
    "terminated before it was ready": (crash_looping(143), Reason.WARMUP_STALLED, ["warmup.timeout"]),
    "killed while it served": (ended(137, started=True), Reason.RUNTIME_CRASHED, ["exit code 137"]),
    "crash without a word": (ended(139), Reason.RUNTIME_CRASHED, ["exit code 139."]),
    "crash with last words": (
        ended(1, "Traceback\n  File x\nValueError: bad"),
        Reason.RUNTIME_CRASHED,
        ["exit code 1: ValueError: bad."],
    ),
    "JSON that is no report": (ended(1, "[1, 2]"), Reason.RUNTIME_CRASHED, ["exit code 1: [1, 2]."]),
    "a report without a sentence": (ended(1, report("OutOfMemory", 7)), Reason.RUNTIME_CRASHED, ["exit code 1"]),  # type: ignore[arg-type]
    "evicted": (
        pod(reason="Evicted", message="The node was low on resource: memory."),
        Reason.EVICTED,
        ["The node evicted the pod: The node was low on resource: memory."],
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failing_pod_is_one_reason_and_one_sentence(name: str) -> None:
    failing, reason, words = FAILURES[name]
    found = diagnose_pod(failing)
    assert found is not None
    assert found.reason is reason
    assert found.message.endswith(".")
    assert "\n" not in found.message
    for word in words:
        assert word in found.message


HEALTHY: dict[str, Pod] = {
    "just made": pod(),
    "without any status": {"metadata": {"name": "x"}, "spec": {"containers": []}},
    "pulling": waiting("ContainerCreating"),
    "loading": pod(container={"state": {"running": {}}, "started": False}),
    "serving": pod(conditions={"Ready": {"status": "True"}}, container={"state": {"running": {}}}),
    "serving again after a crash": pod(
        conditions={"Ready": {"status": "True"}},
        container={"state": {"running": {}}, "lastState": {"terminated": {"exitCode": 1}}},
    ),
    "ended well": ended(0),
    "gated, not unschedulable": pod(conditions={"PodScheduled": {"status": "False", "reason": "SchedulingGated"}}),
    "on its way out": {**ended(1), "metadata": {"name": "x", "deletionTimestamp": "2025-01-01T00:00:00Z"}},
    "another container's trouble": pod(
        containerStatuses=[{"name": "sidecar", "state": {"terminated": {"exitCode": 1}}}]
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_pod_without_a_failure_has_nothing_to_tell(name: str) -> None:
    assert diagnose_pod(HEALTHY[name]) is None


@pytest.mark.parametrize("reason", [reason for reason in RuntimeReason if reason is not RuntimeReason.BENCHMARK_FAILED])
def test_every_reason_that_the_runtime_can_give_is_passed_on(reason: RuntimeReason) -> None:
    """The real termination message of the runtime, through the pod's status, to the condition."""
    message = RuntimeFailure(reason, "What is wrong, and what to do.").termination_message()
    found = diagnose_pod(ended(1, message))
    assert found is not None
    assert (str(found.reason), found.message) == (str(reason), "What is wrong, and what to do.")


def test_the_two_faces_of_a_failing_pull_read_the_same() -> None:
    """The kubelet alternates between them; the status must not."""
    detail = 'failed to resolve reference "x": dial tcp {}->10.0.0.9:443: connection refused'
    first = waiting("ErrImagePull", "rpc error: code = Unknown desc = " + detail.format("10.1.2.3:40123"))
    second = waiting("ImagePullBackOff", f'Back-off pulling image "x": ErrImagePull: {detail.format("10.1.2.3:52001")}')
    assert diagnose_pod(first) == diagnose_pod(second)


def test_the_most_telling_pod_speaks_for_all() -> None:
    pods = [unschedulable("0/1 nodes"), waiting("ErrImagePull"), ended(1, report("CheckpointInvalid", "No weights."))]
    found = diagnose(pods)
    assert found is not None
    assert found.reason is Reason.CHECKPOINT_INVALID
    assert diagnose(reversed(pods)) == found, "whatever the order of the pods"
    assert diagnose([]) is None


def test_equal_reasons_are_told_the_same_whatever_the_order_of_the_pods() -> None:
    pods = [ended(1, "b"), ended(1, "a")]
    assert diagnose(pods) == diagnose(reversed(pods))


def test_a_message_is_capped() -> None:
    found = diagnose_pod(unschedulable("x " * 5000))
    assert found is not None
    assert len(found.message) <= MESSAGE_LIMIT_CHARACTERS


def test_every_diagnosis_has_its_place_in_the_order() -> None:
    from_runtime = {Reason(str(reason)) for reason in RuntimeReason if reason is not RuntimeReason.BENCHMARK_FAILED}
    assert {reason for _, reason, _ in FAILURES.values()} | from_runtime == set(ORDER)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('pods "demo-1-x" is forbidden: exceeded quota: gpu, requested: 1, used: 4', Reason.QUOTA_EXCEEDED),
        ('pods "demo-1-x" is forbidden: violates PodSecurity "restricted:latest"', Reason.ADMISSION_DENIED),
    ],
)
def test_pods_that_cannot_be_made_are_told_without_their_changing_names(message: str, reason: Reason) -> None:
    found = diagnose_replica_failure(message)
    assert found.reason is reason
    assert found == diagnose_replica_failure(message.replace("demo-1-x", "demo-1-y"))


def fetching(**state: Any) -> dict[str, Any]:
    return pod(initContainerStatuses=[{"name": "fetch-model", **state}])


def test_a_download_that_failed_tells_why_in_its_own_words() -> None:
    message = report("DownloadUnauthorized", "The token was refused for org/name (HTTP 401).")
    for state in ("state", "lastState"):
        found = diagnose_pod(fetching(**{state: {"terminated": {"exitCode": 1, "message": message}}}))
        assert found is not None
        assert (found.reason, found.message) == (
            Reason.DOWNLOAD_UNAUTHORIZED,
            "The token was refused for org/name (HTTP 401).",
        )


def test_a_download_without_last_words_has_its_exit_code() -> None:
    found = diagnose_pod(fetching(state={"terminated": {"exitCode": 137}}))
    assert found is not None
    assert found.reason is Reason.DOWNLOAD_FAILED
    assert "137" in found.message


def test_a_missing_token_is_named_before_the_download_starts() -> None:
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}
    found = diagnose_pod(fetching(state={"waiting": waiting}))
    assert found is not None
    assert found.reason is Reason.CONTAINER_CONFIG_INVALID
    assert 'secret "hub" not found' in found.message


def test_a_download_that_runs_or_is_done_has_nothing_to_tell() -> None:
    assert diagnose_pod(fetching(state={"running": {}})) is None
    assert diagnose_pod(fetching(state={"terminated": {"exitCode": 0, "message": '{"event":"fetched"}'}})) is None
