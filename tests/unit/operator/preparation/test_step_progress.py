"""While a Job makes or judges a model, the status says how far it is: with news alone, at most about once a minute."""

from __future__ import annotations

from typing import Any

from millstream_operator.kube.index import OwnerKey
from millstream_operator.kube.kinds import JOB, POD
from millstream_operator.probing.step_reports import INTERVAL_SECONDS
from millstream_operator.rendering.preparation_job import StepKind
from tests.support.fake_cluster import pod_of
from tests.support.fake_operator import FakeOperator
from tests.support.llmdeployments import NAMESPACE
from tests.support.prepared_models import arguments, preparing, until

Manifest = dict[str, Any]
KEY = OwnerKey(NAMESPACE, "demo")
BEGUN = 11.0  # seconds: a pod is asked for the first time ten after it was seen


def run_pod(operator: FakeOperator, command: str, kind: StepKind) -> str:
    """Let a pod of the Job run; return its name."""
    (job,) = [job for job in operator.cluster.all(JOB) if arguments(job)[0] == command]
    name = f"{job['metadata']['name']}-runs"
    pod = pod_of(name, job["spec"]["template"], ready=False)
    pod["status"] |= {
        "phase": "Running",
        "containerStatuses": [{"name": kind.container, "ready": False, "state": {"running": {}}}],
    }
    owner = {"kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
    pod["metadata"]["ownerReferences"] = [owner]
    operator.cluster.put(pod)
    return name


def working(stage: str, done: float, total: float, eta_seconds: float | None = None) -> Manifest:
    report: Manifest = {"ready": False, "phase": "Working", "progress": {"stage": stage, "done": done, "total": total}}
    return report if eta_seconds is None else report | {"eta_seconds": eta_seconds}


async def quantizing() -> tuple[FakeOperator, str]:
    """An operator that has seen the pod of its Job, and the pod's name."""
    operator = await preparing("quantize")
    name = run_pod(operator, "quantize", StepKind.QUANTIZE)
    await operator.turn()
    operator.woken.clear()
    return operator, name


async def test_the_layer_and_the_time_that_is_left_are_told() -> None:
    operator, name = await quantizing()
    operator.pods.reports[name] = working("layers", 11.4, 32, 2381.0)
    await operator.ask_pods(BEGUN)
    assert operator.woken == [KEY]
    await operator.turn()
    for kind in ("ModelReady", "Ready"):
        assert "): layer 12 of 32, about 40 min left. Pods of an earlier" in operator.condition(kind)["message"], kind
    assert operator.condition("ModelReady")["reason"] == "Quantizing"


async def test_what_is_no_news_wakes_and_writes_nothing() -> None:
    operator, name = await quantizing()
    operator.pods.reports[name] = working("layers", 11.4, 32, 2381.0)
    await operator.ask_pods(BEGUN)
    await operator.turn()
    operator.woken.clear()
    operator.client.requests.clear()
    for second in range(1, 11):
        operator.pods.reports[name] = working("layers", 11.4 + second / 100, 32, 2381.0 - second * 50)
        await operator.ask_pods(INTERVAL_SECONDS)
        await operator.turn()
    assert operator.woken == [], "500 s less are left, rounded to the same 40 min"
    assert operator.writes == []


async def test_a_pod_is_asked_about_once_a_minute_and_its_words_stay_in_between() -> None:
    operator, name = await quantizing()
    operator.pods.reports[name] = working("layers", 0.5, 32)
    operator.pods.asked.clear()
    for second in range(600):
        operator.pods.reports[name] = working("layers", second / 20, 32)
        await operator.ask_pods(1.0)
    assert 9 <= operator.pods.asked.count(name) <= 11
    operator.client.requests.clear()
    operator.pods.reports[name] = working("layers", 31.0, 32)
    await operator.turn()
    await operator.turn()
    assert len(operator.writes) <= 1


async def test_the_gate_has_its_own_progress_and_nothing_is_asked_after_it() -> None:
    operator, first = await quantizing()
    operator.pods.reports[first] = working("layers", 31.5, 32, 12.0)
    await operator.ask_pods(BEGUN)
    operator.cluster.remove(POD, first)
    await until(operator, "quality")
    assert "layer" not in operator.condition("ModelReady")["message"]
    name = run_pod(operator, "quality", StepKind.JUDGE)
    await operator.turn()
    operator.pods.reports[name] = working("quality", 37.0, 100, 200.0)
    await operator.ask_pods(BEGUN)
    await operator.turn()
    message = operator.condition("ModelReady")["message"]
    assert message.startswith("Step 2 of 2")
    assert "): quality 35 %, about 4 min left." in message
    operator.cluster.remove(POD, name)
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    operator.pods.asked.clear()
    for _ in range(30):
        await operator.ask_pods(INTERVAL_SECONDS)
    assert not {first, name} & {*operator.pods.asked}


async def test_a_pod_that_does_not_answer_changes_nothing_and_is_asked_less_often() -> None:
    """One of an older runtime, or behind a policy of the namespace."""
    operator, name = await quantizing()
    before = operator.condition("ModelReady")["message"]
    operator.pods.asked.clear()
    for _ in range(7200):
        await operator.ask_pods(1.0)
    await operator.turn()
    assert operator.condition("ModelReady")["message"] == before
    assert operator.woken == []
    assert 4 <= operator.pods.asked.count(name) <= 14
