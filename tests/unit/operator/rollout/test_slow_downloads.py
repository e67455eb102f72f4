"""A pod that downloads or loads a large model is not late while its bytes move, and is once they stop."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import POD
from millstream_operator.probing.pod_reports import LEAST_STALL_SECONDS
from millstream_operator.rendering.download_size import download_bytes, download_seconds
from millstream_operator.status.download_time import remaining_download_seconds
from millstream_operator.status.warmup import loading
from tests.support.fake_operator import FakeOperator
from tests.support.llmdeployments import deployment
from tests.support.rollout_world import World, image, served

Manifest = dict[str, Any]
DOWNLOADING = {
    "initContainerStatuses": [{"name": "fetch-model", "restartCount": 0, "state": {"running": {}}}],
    "containerStatuses": [{"name": "runtime", "restartCount": 0, "state": {"waiting": {"reason": "PodInitializing"}}}],
}
LOADING = {
    "containerStatuses": [{"name": "runtime", "restartCount": 0, "state": {"running": {}}}],
}
STAGES = {"Downloading": DOWNLOADING, "LoadingWeights": LOADING}
READY = {"type": "Ready", "status": "True"}
LONG_SECONDS = 3600.0


async def late_in(stage: str) -> World:
    """Replaced in place; the new pod is in this stage when the Deployment's deadline passes."""
    one = await served("ResourceAware")
    one.controller.failing["large"] = STAGES[stage]
    await one.apply(**image("large"))
    assert one.images() == []
    return one


async def report(one: World, stage: str, done_bytes: int, after_seconds: float = 40.0) -> None:
    """The pod reports, then the operator turns."""
    (pod,) = one.controller.pods()
    body = {"phase": stage, "progress": {"done_bytes": done_bytes, "total_bytes": 400 * 10**9}}
    one.operator.pods.reports[pod["metadata"]["name"]] = body
    await one.operator.ask_pods(after_seconds)
    await one.settle()


@pytest.mark.parametrize("stage", STAGES)
async def test_a_pod_whose_bytes_move_is_not_late(stage: str) -> None:
    one = await late_in(stage)
    await report(one, stage, 1)
    one.controller.let_the_deadline_pass()
    for step in range(1, 40):
        await report(one, stage, step * 10**9, LONG_SECONDS / 40)
        assert one.operator.condition("Ready")["reason"] == "RollingOut"
        assert one.operator.condition("Stalled") == {}
    assert one.decisions == ["ReplacingInPlace"]
    one.controller.failing.clear()
    (pod,) = one.controller.pods()
    one.cluster.set_status(POD, pod["metadata"]["name"], pod["status"] | {"conditions": [READY]})
    await one.settle()
    assert one.images() == ["large"]
    assert one.operator.condition("Ready")["status"] == "True"


async def test_a_pod_between_its_download_and_its_runtime_is_not_late() -> None:
    """The kubelet takes a moment from one container to the next."""
    one = await late_in("Downloading")
    await report(one, "Downloading", 10**9)
    one.controller.let_the_deadline_pass()
    (pod,) = one.controller.pods()
    done = {"name": "fetch-model", "restartCount": 0, "state": {"terminated": {"exitCode": 0}}}
    one.cluster.set_status(POD, pod["metadata"]["name"], pod["status"] | {"initContainerStatuses": [done]})
    await one.settle()
    assert one.images() == []
    assert one.decisions == ["ReplacingInPlace"]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_pod_whose_bytes_stop_is_late(stage: str) -> None:
    one = await late_in(stage)
    await report(one, stage, 10**9)
    one.controller.let_the_deadline_pass()
    await one.settle()
    assert one.images() == []
    one.operator.woken.clear()
    for _ in range(60):
        await report(one, stage, 10**9)
        if one.images():
            break
    assert one.operator.woken, "the operator is woken when they stop, whatever else happens"
    assert one.images() == ["good"]
    assert one.decisions[0] == "RolledBack"


async def test_bytes_that_were_there_before_are_no_progress() -> None:
    """A download that breaks off and starts again and again at the same place never ends."""
    one = await late_in("Downloading")
    one.controller.let_the_deadline_pass()
    for count in range(200):
        if one.images():
            break
        await report(one, "Downloading", (1 + count % 3) * 10**9)
    assert one.images() == ["good"]


async def test_a_pod_that_reports_nothing_is_late_soon_after_the_deadline() -> None:
    """An older runtime says nothing while it downloads."""
    one = await late_in("Downloading")
    one.controller.let_the_deadline_pass()
    for _ in range(60):
        await one.operator.ask_pods(40.0)
        await one.settle()
        if one.images():
            break
    assert one.images() == ["good"]


async def test_a_restarted_operator_waits_for_a_report_before_it_gives_up() -> None:
    one = await late_in("Downloading")
    await report(one, "Downloading", 10**9)
    one.controller.let_the_deadline_pass()
    one.operator = FakeOperator(one.cluster)
    await one.settle()
    assert one.images() == []
    assert one.decisions == ["ReplacingInPlace"]
    await report(one, "Downloading", 2 * 10**9, LEAST_STALL_SECONDS)
    assert one.images() == []


async def test_a_download_that_reports_nothing_has_the_time_of_its_checkpoint() -> None:
    """400 GB, of which an older runtime says nothing, on a Deployment whose deadline has passed."""
    one = await served("ResourceAware")
    running = {"running": {"startedAt": one.operator.now}}
    one.controller.failing["large"] = DOWNLOADING | {
        "initContainerStatuses": [{"name": "fetch-model", "restartCount": 0, "state": running}]
    }
    await one.apply(**image("large"))
    (pod,) = one.controller.pods()
    downloads = {"initContainers": [{"name": "fetch-model"}], "volumes": [template("400Gi")["spec"]["volumes"][0]]}
    one.cluster.edit(POD, pod["metadata"]["name"], lambda live: live["spec"].update(downloads))
    one.controller.let_the_deadline_pass()
    allowed = download_seconds({}, template("400Gi"))
    for _ in range(10):
        await one.operator.ask_pods((allowed - 60) / 10)
        await one.settle()
    assert one.images() == []
    assert one.operator.condition("Stalled") == {}
    await one.operator.ask_pods(120.0)
    await one.settle()
    assert one.images() == ["good"]


# How long the deadline is


def template(limit: str | None = None, *, fetches: bool = True) -> Manifest:
    volume = {"name": "model", "emptyDir": {"sizeLimit": limit} if limit else {}}
    return {"spec": {"initContainers": [{"name": "fetch-model"}] if fetches else [], "volumes": [volume]}}


PLAN = {"gpusPerReplica": 4, "memory": {"weightsBytes": 99 * 10**9, "embeddingsBytes": 10**9, "draftWeightsBytes": 0}}


def test_the_default_deadline_has_time_for_the_download() -> None:
    assert download_bytes(PLAN, template()) == 400 * 10**9
    assert download_seconds(PLAN, template()) == 400 * 10**9 // 50_000_000 // 60 * 60
    assert download_seconds(PLAN, template()) > 3600, "400 GB over one Gbit/s take about an hour"
    assert download_bytes({}, template("3Gi")) == 3 << 30
    assert download_seconds({}, template("1Gi")) == 0, "a small model changes nothing"
    both = template("3Gi")["spec"] | {"initContainers": [{"name": "fetch-model"}, {"name": "draft-fetch-model"}]}
    both["volumes"].append({"name": "draft-model", "emptyDir": {"sizeLimit": "1Gi"}})
    assert download_bytes({}, {"spec": both}) == 4 << 30, "one after the other"
    ledger = {"memory": {"weightsBytes": 99 * 10**9, "embeddingsBytes": 10**9, "draftWeightsBytes": 10**9}}
    alone = {"spec": {"initContainers": [{"name": "draft-fetch-model"}], "volumes": []}}
    assert download_bytes(ledger, alone) == 10**9, "the model is in the image"
    for unknown in (template(), template("many"), template("9Gi", fetches=False), {}):
        assert download_seconds({}, unknown) == 0


def test_the_time_for_a_draft_runs_from_the_first_download() -> None:
    """Of 6 GB in all, after a minute: the model is there, and its draft is on its way."""
    pod = template("4Gi")
    pod["spec"]["initContainers"].append({"name": "draft-fetch-model"})
    pod["spec"]["volumes"].append({"name": "draft-model", "emptyDir": {"sizeLimit": "2Gi"}})
    done = {"name": "fetch-model", "state": {"terminated": {"exitCode": 0, "startedAt": "2025-01-01T00:00:00Z"}}}
    running = {"name": "draft-fetch-model", "state": {"running": {"startedAt": "2025-01-01T00:00:50Z"}}}
    pod["metadata"] = {"uid": "u", "labels": {"millstream.dev/revision": "r", "millstream.dev/role": "leader"}}
    pod["status"] = {"initContainerStatuses": [done, running]}
    left = remaining_download_seconds(deployment(), [pod], {}, "r", "2025-01-01T00:01:00Z")
    assert left == {"u": download_seconds({}, pod) - 60}
    assert loading([pod]) == [pod]
    running["state"] = {"terminated": {"exitCode": 0}}
    pod["status"]["containerStatuses"] = [{"name": "runtime", "state": {"waiting": {"reason": "PodInitializing"}}}]
    assert remaining_download_seconds(deployment(), [pod], {}, "r", "2025-01-01T00:01:00Z") == {}
    assert loading([pod]) == [pod], "between its downloads and its runtime"
    pod["status"]["initContainerStatuses"] = [running]
    assert loading([pod]) == [pod], "also where the draft alone is downloaded"
