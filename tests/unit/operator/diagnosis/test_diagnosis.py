"""A pod that fails is one reason and one sentence: never "see the logs", and never another sentence at each look."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.diagnosis.admission import pods_not_created
from millstream_operator.diagnosis.container_failures import RUNTIME_REASONS
from millstream_operator.diagnosis.diagnosis import MESSAGE_LIMIT_CHARACTERS
from millstream_operator.diagnosis.pod_failures import ORDER, diagnose, diagnose_pod
from millstream_operator.diagnosis.reasons import Reason
from millstream_runtime.errors import FailureReason, RuntimeFailure

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


LOOPS: dict[str, Any] = {
    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting"}},
    "lastState": {"terminated": {"exitCode": 3, "reason": "Error"}},
}
NO_PULL: dict[str, Any] = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}}


def beside_the_runtime(container: dict[str, Any]) -> Pod:
    """A pod whose runtime runs and is not asked, because a container that a webhook added does not run."""
    runtime = {"name": "runtime", "ready": True, "started": True, "state": {"running": {}}}
    found = pod(containerStatuses=[{"name": "istio-proxy", **container}, runtime])
    found["spec"]["containers"].append({"name": "istio-proxy", "image": "proxy:1"})
    return found


def before_the_runtime(container: dict[str, Any]) -> Pod:
    runtime = {"name": "runtime", "state": {"waiting": {"reason": "PodInitializing"}}}
    return pod(containerStatuses=[runtime], initContainerStatuses=[{"name": "istio-init", **container}])


# name: (pod, reason, words of the message)
FAILURES: dict[str, tuple[Pod, Reason, list[str]]] = {
    "no node has room": (
        unschedulable("0/3 nodes are available: 3 Insufficient memory."),
        Reason.UNSCHEDULABLE,
        ["No node takes the pod. Of 3 nodes: 3 without enough free memory."],
    ),
    "a claim in use": (
        unschedulable(
            "0/1 nodes are available: 1 node has pod using PersistentVolumeClaim with the same name and "
            "ReadWriteOncePod access mode."
        ),
        Reason.VOLUME_PENDING,
        ["1 where another pod holds its ReadWriteOncePod claim"],
    ),
    "no free GPU": (
        unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
        Reason.INSUFFICIENT_GPU,
        ["No node has enough free nvidia.com/gpu for the pod. Of 3 nodes: 3 without enough free nvidia.com/gpu."],
    ),
    "a claim that is not there": (
        unschedulable('0/3 nodes are available: persistentvolumeclaim "weights" not found. not found'),
        Reason.VOLUME_PENDING,
        ["The PersistentVolumeClaim weights does not exist in this namespace"],
    ),
    "the node is silent": (
        pod(
            conditions={"ContainersReady": {"status": "True"}, "Ready": {"status": "False"}},
            container={"ready": True, "started": True, "state": {"running": {}}},
        ),
        Reason.NODE_LOST,
        ["does not answer"],
    ),
    "the node shuts down": (pod(reason="NodeShutdown", phase="Failed"), Reason.NODE_LOST, ["shutting down"]),
    "the node refused it": (
        pod(reason="UnexpectedAdmissionError", message="Allocate failed due to no healthy devices", phase="Failed"),
        Reason.UNSCHEDULABLE,
        ["did not take the pod: Allocate failed due to no healthy devices."],
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
    "an added container that crashes": (
        beside_the_runtime(LOOPS),
        Reason.CONTAINER_CRASHED,
        ["The container istio-proxy", "not the operator's", "exit code 3", "-c istio-proxy --previous"],
    ),
    "an added container that ended": (
        beside_the_runtime({"state": {"terminated": {"exitCode": 1}}}),
        Reason.CONTAINER_CRASHED,
        ["The container istio-proxy", "exit code 1", "-c istio-proxy."],
    ),
    "an added container without its image": (
        beside_the_runtime(NO_PULL),
        Reason.IMAGE_PULL_FAILED,
        ["The image proxy:1 of the container istio-proxy cannot be pulled: not found."],
    ),
    "an added container without its Secret": (
        beside_the_runtime({"state": {"waiting": {"reason": "CreateContainerConfigError", "message": "no secret"}}}),
        Reason.CONTAINER_CONFIG_INVALID,
        ["The container istio-proxy cannot be created: no secret."],
    ),
    "an added init container that crashes": (
        before_the_runtime(LOOPS),
        Reason.CONTAINER_CRASHED,
        ["The container istio-init", "exit code 3"],
    ),
    "an added init container without its image": (
        before_the_runtime({"image": "init:1", **NO_PULL}),
        Reason.IMAGE_PULL_FAILED,
        ["The image init:1 of the container istio-init cannot be pulled"],
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
    "a lost rank": (
        crash_looping(1, report("NCCLFailed", "Rank 1 was killed by SIGKILL.")),
        Reason.NCCL_FAILED,
        ["Rank 1 was killed by SIGKILL."],
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
    "NCCL": (
        ended(1, report("NCCLFailed", "Rank 1 lost rank 0: ncclRemoteError.")),
        Reason.NCCL_FAILED,
        ["Rank 1 lost rank 0"],
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
    "another container that ended well": pod(
        containerStatuses=[{"name": "sidecar", "state": {"terminated": {"exitCode": 0}}}]
    ),
    "another container that runs again": pod(
        containerStatuses=[{"name": "sidecar", "state": {"running": {}}, "lastState": {"terminated": {"exitCode": 1}}}]
    ),
    "another init container that waits for its turn": pod(
        initContainerStatuses=[{"name": "istio-init", "state": {"waiting": {"reason": "PodInitializing"}}}]
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_pod_without_a_failure_has_no_diagnosis(name: str) -> None:
    assert diagnose_pod(HEALTHY[name]) is None


def test_every_reason_of_the_runtime_is_a_reason_of_the_operator() -> None:
    of_pods = {reason.value for reason in FailureReason} - {FailureReason.BENCHMARK_FAILED.value}
    missing = of_pods - {reason.value for reason in Reason}
    assert not missing, f"add {missing} to diagnosis/reasons.py and docs/reasons.md"
    assert {reason.value for reason in RUNTIME_REASONS} == of_pods


@pytest.mark.parametrize("reason", [reason for reason in FailureReason if reason is not FailureReason.BENCHMARK_FAILED])
def test_every_reason_that_the_runtime_can_give_is_passed_on(reason: FailureReason) -> None:
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


def test_the_most_useful_diagnosis_stands_for_all_pods() -> None:
    pods = [unschedulable("0/1 nodes"), waiting("ErrImagePull"), ended(1, report("CheckpointInvalid", "No weights."))]
    found = diagnose(pods)
    assert found is not None
    assert found.reason is Reason.CHECKPOINT_INVALID
    assert diagnose(reversed(pods)) == found, "whatever the order of the pods"
    assert diagnose([]) is None


def test_the_diagnosis_does_not_depend_on_the_order_of_the_pods() -> None:
    pods = [ended(1, "b"), ended(1, "a")]
    assert diagnose(pods) == diagnose(reversed(pods))


def test_a_message_is_capped() -> None:
    found = diagnose_pod(unschedulable("x " * 5000))
    assert found is not None
    assert len(found.message) <= MESSAGE_LIMIT_CHARACTERS


def test_every_diagnosis_has_its_place_in_the_order() -> None:
    from_runtime = {Reason(str(reason)) for reason in FailureReason if reason is not FailureReason.BENCHMARK_FAILED}
    from_kueue = {Reason.QUOTA_EXCEEDED}
    assert {reason for _, reason, _ in FAILURES.values()} | from_runtime | from_kueue == set(ORDER)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('pods "demo-1-x" is forbidden: exceeded quota: gpu, requested: 1, used: 4', Reason.QUOTA_EXCEEDED),
        ('pods "demo-1-x" is forbidden: violates PodSecurity "restricted:latest"', Reason.ADMISSION_DENIED),
    ],
)
def test_pods_that_cannot_be_created_are_reported_without_their_changing_names(message: str, reason: Reason) -> None:
    found = pods_not_created(message)
    assert found is not None
    assert found.reason is reason
    assert found == pods_not_created(message.replace("demo-1-x", "demo-1-y"))


# Interpreted endings


def restarted(code: int, lived_seconds: int, *, budget_seconds: int = 600, **container: Any) -> Pod:
    """A pod whose runtime ended after so many seconds and runs again."""
    minutes, seconds = divmod(lived_seconds, 60)
    ended = {
        "exitCode": code,
        "startedAt": "2025-01-01T10:00:00Z",
        "finishedAt": f"2025-01-01T10:{minutes:02d}:{seconds:02d}Z",
    }
    found = pod(container={"state": {"running": {}}, "started": False, "lastState": {"terminated": ended}, **container})
    found["spec"]["containers"][1]["startupProbe"] = {"periodSeconds": 1, "failureThreshold": budget_seconds}
    return found


@pytest.mark.parametrize("code", [0, 137, 143])
def test_who_is_ended_when_its_time_is_over_was_too_slow_and_the_phase_is_named(code: int) -> None:
    """The runtime leaves in good order, with exit code 0, when the kubelet's startup probe gives it up."""
    found = diagnose_pod(restarted(code, 601), {}, "LoadingWeights")
    assert found is not None
    assert found.reason is Reason.WARMUP_STALLED
    assert "600 seconds" in found.message
    assert "still in phase LoadingWeights" in found.message


def test_who_is_killed_at_another_time_was_not_too_slow() -> None:
    """A liveness probe's kill of a model that served, seen while it boots again."""
    for seconds in (30, 1700):
        found = diagnose_pod(restarted(137, seconds))
        assert found is not None
        assert found.reason is Reason.RUNTIME_CRASHED
        assert diagnose_pod(restarted(0, seconds)) is None


CPU_PLAN = {
    "accelerator": "CPU",
    "memory": {"usableBytes": 2 << 30, "weightsBytes": 1200 << 20, "kvCacheBytes": 600 << 20, "activationsBytes": 0},
}


def test_out_of_memory_shows_the_planned_memory_and_the_limit() -> None:
    killed = ended(137, reason="OOMKilled")
    killed["spec"]["containers"][1]["resources"] = {"limits": {"memory": "2Gi"}}
    found = diagnose_pod(killed, CPU_PLAN)
    assert found is not None
    assert "memory limit of 2Gi" in found.message
    assert "The plan counted on 2.0 GiB: 1.2 GiB weights, 0.6 GiB KV cache." in found.message
    on_gpu = diagnose_pod(killed, {**CPU_PLAN, "accelerator": "A100-80GB"})
    assert on_gpu is not None
    assert "The plan" not in on_gpu.message, "the kernel's limit has nothing to do with the GPU's ledger"
    own = diagnose_pod(ended(1, report("OutOfMemory", "CUDA has 1 GiB left.")), {**CPU_PLAN, "accelerator": "L4"})
    assert own is not None
    assert own.message.startswith("CUDA has 1 GiB left. The plan counted on")


def test_an_image_that_an_init_container_cannot_pull_is_reported() -> None:
    """A pod that downloads its model pulls for that container first; the runtime's own only says PodInitializing."""
    waits = {"name": "fetch-model", "image": IMAGE, "state": {"waiting": {"reason": "ErrImagePull", "message": "no"}}}
    found = diagnose_pod(pod(initContainerStatuses=[waits], container={"state": {"waiting": {"reason": "PodInit"}}}))
    assert found is not None
    assert (found.reason, IMAGE in found.message) == (Reason.IMAGE_PULL_FAILED, True)


@pytest.mark.parametrize("volumes", [[], [{"name": "api-keys", "secret": {"secretName": "chat-keys"}}]])
def test_a_file_of_api_keys_is_named_by_its_secret_and_its_key(volumes: list[dict[str, Any]]) -> None:
    said = "--api-keys-file /var/run/secrets/millstream/api-keys/chat-keys/kyes cannot be read: No such file."
    failed = ended(1, report("APIKeysInvalid", said))
    failed["spec"]["volumes"] = [
        {
            "name": "api-keys",
            "secret": {"secretName": "chat-keys", "items": [{"key": "kyes", "path": "c/kyes"}]},
        }
    ]
    found = diagnose_pod(failed)
    assert found is not None
    assert found.message == (
        "The key kyes of the Secret chat-keys (auth.apiKeysSecretRef) cannot be used, or does not exist: " + said
    )
    failed["spec"]["volumes"] = volumes
    found = diagnose_pod(failed)
    assert found is not None
    assert found.message == said, "nothing says where the file comes from"


def test_a_secret_that_the_runtime_names_is_not_named_twice() -> None:
    said = "Secret chat-keys has no key kyes, or does not exist: create it, or correct auth.apiKeysSecretRef."
    failed = ended(1, report("APIKeysInvalid", said))
    secret = {"secretName": "chat-keys", "items": [{"key": "kyes", "path": "chat-keys/kyes"}]}
    failed["spec"]["volumes"] = [{"name": "api-keys", "secret": secret}]
    found = diagnose_pod(failed)
    assert found is not None
    assert found.message == said
