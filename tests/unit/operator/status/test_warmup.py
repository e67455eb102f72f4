"""`status.warmup` and `status.memory`: how far the slowest pod is, reported once and not after every probe."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import DEPLOYMENT, POD
from tests.support.fake_cluster import pod_of
from tests.support.fake_operator import FakeOperator, respec, served, world
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
POD_NAME = "demo-0"
RUNNING = {"running": {"startedAt": "2025-01-01T00:00:00Z"}}


def put_pod(operator: FakeOperator, name: str = POD_NAME, *, scheduled: bool = True, **status: Any) -> None:
    """A pod of the wanted revision that is not ready."""
    bound = {"type": "PodScheduled", "status": "True" if scheduled else "False", "reason": "", "message": ""}
    template = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    conditions = [{"type": "Ready", "status": "False"}, bound]
    operator.cluster.put(pod_of(name, template, ready=False))
    operator.cluster.set_status(POD, name, {"conditions": conditions} | status)


def runtime(state: Manifest, **rest: Any) -> Manifest:
    return {"containerStatuses": [{"name": "runtime", "state": state, **rest}]}


def loading(eta_seconds: float | None = None, **rest: Any) -> Manifest:
    body: Manifest = {"phase": "LoadingWeights", "boot_seconds": {"Starting": 2.0, "LoadingWeights": 1.0}, **rest}
    return body | ({"eta_seconds": eta_seconds} if eta_seconds is not None else {})


async def starting(**spec: Any) -> FakeOperator:
    """An operator whose pod runs and loads its weights."""
    operator = FakeOperator(world(manifest(**spec)))
    await operator.turn()
    put_pod(operator, **runtime(RUNNING))
    operator.pods.reports[POD_NAME] = loading()
    await operator.turn()
    return operator


async def test_the_phases_of_a_pod_are_told_as_it_comes_up() -> None:
    operator = FakeOperator(world())
    await operator.turn()
    assert operator.status()["warmup"] == {"phase": "Scheduling"}
    put_pod(operator, scheduled=False)
    await operator.turn()
    assert operator.status()["warmup"] == {"phase": "Scheduling"}
    fetching: Manifest = {"initContainerStatuses": [{"name": "fetch-model", "state": {"running": {}}}]}
    operator.cluster.remove(POD, POD_NAME)
    put_pod(operator, **fetching)
    await operator.turn()
    assert operator.status()["warmup"] == {"phase": "Downloading"}
    assert operator.pods.asked == [], "nothing listens yet"
    operator.cluster.set_status(
        POD, POD_NAME, {"conditions": [{"type": "PodScheduled", "status": "True"}]} | runtime(RUNNING)
    )
    await operator.turn()
    assert operator.status()["warmup"] == {"phase": "Starting"}
    operator.pods.reports[POD_NAME] = loading()
    await operator.ask_pods()
    assert [str(key) for key in operator.woken] == ["LLMDeployment team/demo"]
    await operator.turn()
    assert operator.status()["warmup"] == {"phase": "LoadingWeights"}
    assert "the slowest is in phase LoadingWeights" in operator.condition("WarmedUp")["message"]
    assert operator.condition("PodsScheduled")["status"] == "True"
    operator.cluster.roll_out()
    await operator.settle()
    assert operator.status()["warmup"]["phase"] == "Ready"


async def test_the_time_is_absolute_and_is_rewritten_only_when_it_moves_far() -> None:
    operator = await starting()
    operator.pods.reports[POD_NAME] = loading(100.0)
    await operator.ask_pods()
    await operator.turn()
    assert operator.status()["warmup"]["estimatedReadyTime"] == "2025-01-01T00:01:41Z"
    written = len(operator.writes)
    for eta in (97.0, 88.0, 70.0, 64.0, 50.0):  # it drifts by less than a fifth
        operator.pods.reports[POD_NAME] = loading(eta)
        await operator.ask_pods(10.0)
        await operator.turn()
    operator.now = "2025-01-01T00:01:06Z"
    operator.seconds += 15.0
    await operator.turn()  # woken by something else, long after the pod's last answer
    assert len(operator.writes) == written
    operator.pods.reports[POD_NAME] = loading(300.0)
    await operator.ask_pods(10.0)
    await operator.turn()
    assert operator.status()["warmup"]["estimatedReadyTime"] == "2025-01-01T00:06:16Z"
    assert len(operator.writes) == written + 1


async def test_what_the_last_warmup_took_is_the_first_estimate_of_the_next() -> None:
    operator = FakeOperator(world())
    operator.model.ready = {"phase": "Ready", "boot_seconds": {"Starting": 2.2, "LoadingWeights": 37.9}}
    await operator.settle()
    assert operator.status()["warmup"] == {"phase": "Ready", "seconds": 40}
    respec(operator.cluster, engine={"maxNumSeqs": 8})
    await operator.turn()
    put_pod(operator, **runtime(RUNNING))
    await operator.turn()
    assert operator.status()["warmup"]["estimatedReadyTime"] == "2025-01-01T00:00:40Z"


async def test_a_crash_loop_writes_its_reason_once_and_not_its_rounds() -> None:
    operator = await starting()
    await operator.ask_pods()
    await operator.turn()
    ended = {"terminated": {"exitCode": 1, "message": "boom"}}
    backing_off = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    scheduled = {"conditions": [{"type": "PodScheduled", "status": "True"}]}
    operator.cluster.set_status(POD, POD_NAME, scheduled | runtime(ended))
    await operator.turn()
    assert operator.condition("WarmedUp")["reason"] == "RuntimeCrashed"
    written = len(operator.writes)
    for restarts in range(1, 6):
        last = {"lastState": ended, "restartCount": restarts}
        operator.cluster.set_status(POD, POD_NAME, scheduled | runtime(backing_off, **last))
        await operator.turn()
        operator.cluster.set_status(POD, POD_NAME, scheduled | runtime(RUNNING, **last))
        await operator.turn()
        operator.pods.reports[POD_NAME] = {"phase": "Starting", "boot_seconds": {"Starting": 1.0}}
        await operator.ask_pods(60.0)
        operator.pods.reports[POD_NAME] = loading(10.0)
        await operator.ask_pods(60.0)
        await operator.turn()
    assert len(operator.writes) == written
    assert operator.status()["warmup"] == {"phase": "LoadingWeights"}, "the furthest that it reached"


async def test_a_pod_that_answers_and_gets_nowhere_is_stalled_in_its_phase() -> None:
    operator = await starting(warmup={"timeout": "20m"})
    await operator.ask_pods()
    for _ in range(20):
        await operator.ask_pods(25.0)
    await operator.turn()
    assert operator.condition("Ready")["reason"] != "WarmupStalled", "half of the budget is not over"
    for _ in range(10):
        await operator.ask_pods(30.0)
    await operator.turn()
    assert operator.condition("Ready")["reason"] == "WarmupStalled"
    assert "in phase LoadingWeights" in operator.condition("WarmedUp")["message"]
    operator.pods.reports[POD_NAME] = {"phase": "WarmingUp"}
    await operator.ask_pods(30.0)
    await operator.turn()
    assert operator.condition("Ready")["reason"] == "Starting", "it moves again"


async def test_bytes_that_arrive_are_progress_also_within_one_phase() -> None:
    operator = await starting(warmup={"timeout": "2m"})
    for count in range(20):
        operator.pods.reports[POD_NAME] = loading(progress={"done_bytes": count * 1000, "total_bytes": 10**6})
        await operator.ask_pods(30.0)
    await operator.turn()
    assert operator.condition("Ready")["reason"] == "Starting"


async def test_a_pod_that_was_ready_and_does_not_respond_is_no_stalled_warmup() -> None:
    operator = await starting(warmup={"timeout": "2m"})
    operator.pods.reports[POD_NAME] = {"phase": "Unresponsive", "ready": False}
    for _ in range(20):
        await operator.ask_pods(30.0)
    await operator.turn()
    assert operator.condition("Ready")["reason"] != "WarmupStalled", "the kubelet does not restart it for that"
    assert operator.status()["warmup"]["phase"] == "Unresponsive"


MEASURED = {"weights_bytes": 100, "activations_bytes": 20, "kv_cache_bytes": 300, "kv_cache_tokens": 7, "else": 1}


async def test_memory_is_measured_once_a_revision() -> None:
    operator = FakeOperator(world())
    operator.model.ready = {"phase": "Ready", "memory": MEASURED}
    await operator.settle()
    measured = {"weightsBytes": 100, "activationsBytes": 20, "kvCacheBytes": 300, "kvCacheTokens": 7}
    assert operator.status()["memory"]["measured"] == measured
    operator.client.requests.clear()
    (pod,) = operator.cluster.all(POD)
    operator.cluster.remove(POD, pod["metadata"]["name"])
    operator.model.ready = {"phase": "Ready", "memory": MEASURED | {"kv_cache_bytes": 301}}
    operator.cluster.roll_out()
    await operator.settle()
    assert operator.status()["memory"]["measured"] == measured, "another pod of the same revision changes nothing"
    respec(operator.cluster, engine={"maxNumSeqs": 8})
    await operator.turn()
    assert "measured" not in operator.status().get("memory", {}), "what was measured was another revision"
    await operator.settle()
    assert operator.status()["memory"]["measured"]["kvCacheBytes"] == 301


async def test_a_pod_may_say_anything() -> None:
    operator = await starting()
    for body in (
        {"phase": "x" * 1000},
        {"phase": 7},
        {
            "phase": "Fine",
            "boot_seconds": {"a": "b", "c": -1},
            "eta_seconds": float("nan"),
            "memory": {"weights_bytes": 1e9},
        },
        {"phase": "Fine", "boot_seconds": [], "progress": 3, "memory": {"weights_bytes": 1 << 60}},
        {},
    ):
        operator.pods.reports[POD_NAME] = body
        await operator.ask_pods(60.0)
        await operator.turn()
    assert operator.status()["warmup"] == {"phase": "Fine"}
    assert "memory" not in operator.status()


async def test_a_steady_state_asks_no_pod_and_writes_nothing() -> None:
    operator = await served()
    operator.pods.asked.clear()
    for _ in range(5):
        await operator.ask_pods(100.0)
        await operator.turn()
    assert operator.pods.asked == []
    assert operator.client.written == []


async def test_a_warming_pod_is_asked_ever_more_seldom_and_no_more_when_it_is_gone() -> None:
    operator = await starting()
    for _ in range(600):
        await operator.ask_pods(1.0)
    assert 30 <= len(operator.pods.asked) <= 60
    operator.cluster.remove(POD, POD_NAME)
    await operator.turn()
    asked = len(operator.pods.asked)
    await operator.ask_pods(1000.0)
    assert len(operator.pods.asked) == asked


async def test_scaled_to_zero_has_no_phase() -> None:
    operator = await served()
    respec(operator.cluster, replicas=0)
    await operator.settle()
    assert "warmup" not in operator.status()
    assert {operator.condition(kind)["reason"] for kind in ("PodsScheduled", "WarmedUp")} == {"ScaledToZero"}


@pytest.mark.parametrize("kind", ["PodsScheduled", "WarmedUp"])
async def test_a_served_model_has_its_pods_scheduled_and_warm(kind: str) -> None:
    operator = await served()
    assert operator.condition(kind)["status"] == "True"
