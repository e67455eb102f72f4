"""An inspection that fails or waits says so in its pod's own words, and is tried again; what serves goes on."""

from __future__ import annotations

import json

import pytest

from millstream_operator.facts.job_attempts import LONGEST_RETRY_SECONDS, retry_seconds
from millstream_operator.kube.kinds import (
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    JOB,
    LLM_DEPLOYMENT,
    SERVICE_ACCOUNT,
)
from tests.support.fake_cluster import pod_of
from tests.support.fake_operator import COMMIT, respec, served
from tests.support.inspected_models import (
    TOKEN,
    UNAUTHORIZED,
    Manifest,
    hub,
    model,
    ready_reason,
    the_job,
    under_way,
)
from tests.support.llmdeployments import manifest


async def test_a_refused_token_is_the_pods_own_sentence_and_tried_again_later() -> None:
    operator = await under_way(manifest(model=hub(**TOKEN)))
    operator.cluster.run_jobs(UNAUTHORIZED, 1)
    await operator.turn()
    for kind in ("Planned", "Ready"):
        found = operator.condition(kind)
        assert (found["status"], found["reason"]) == ("False", "DownloadUnauthorized")
        assert found["message"] == "The hub answered HTTP 401 to org/name."
    assert operator.condition("Stalled")["status"] == "True"
    assert operator.retries[-1].at_least_seconds == retry_seconds(1)
    first = the_job(operator.cluster)["metadata"]["name"]

    operator.now = "2025-01-01T00:00:11Z"
    operator.client.requests.clear()
    await operator.turn()
    names = {job["metadata"]["name"] for job in operator.cluster.all(JOB)}
    assert len(names) == 2
    assert first in names, "the failed one stays: it is the reason"
    assert operator.writes == [("apply", "Job")], "the status says the same as before"

    operator.cluster.run_jobs(UNAUTHORIZED, 1, operator.now)
    await operator.turn()
    assert first not in {job["metadata"]["name"] for job in operator.cluster.all(JOB)}
    assert operator.retries[-1].at_least_seconds == retry_seconds(2)

    operator.now = "2025-01-01T00:01:00Z"
    await operator.turn()
    await operator.settle()
    assert ready_reason(operator) == "Ready"


def test_the_time_between_attempts_doubles_up_to_a_limit() -> None:
    assert [retry_seconds(attempt) for attempt in (1, 2, 3)] == [10.0, 20.0, 40.0]
    assert retry_seconds(10**6) == LONGEST_RETRY_SECONDS


async def test_deleting_the_failed_job_asks_again_at_once() -> None:
    operator = await under_way()
    operator.cluster.run_jobs(UNAUTHORIZED, 1)
    await operator.turn()
    operator.cluster.remove(JOB, the_job(operator.cluster)["metadata"]["name"])
    operator.cluster.collect_garbage()
    await operator.settle()
    assert ready_reason(operator) == "Ready"


async def test_another_token_is_another_job_at_once() -> None:
    operator = await under_way(manifest(model=hub(**TOKEN)))
    operator.cluster.run_jobs(UNAUTHORIZED, 1)
    await operator.turn()
    respec(operator.cluster, model=hub(tokenSecretRef={"name": "better", "key": "token"}))
    await operator.turn()
    volumes = the_job(operator.cluster)["spec"]["template"]["spec"]["volumes"]
    assert [volume["secret"]["secretName"] for volume in volumes if "secret" in volume] == ["better"]
    await operator.settle()
    assert ready_reason(operator) == "Ready"


async def test_what_serves_goes_on_serving_and_is_repaired_while_the_next_model_cannot_be_read() -> None:
    operator = await served(manifest(model=hub()))
    respec(operator.cluster, model=hub(revision="gone"), replicas=2)
    failure = json.dumps({"reason": "DownloadFailed", "message": "gone does not exist (HTTP 404)."})
    await operator.turn()
    operator.cluster.run_jobs(failure, 1)
    await operator.turn()
    assert ready_reason(operator) == "DownloadFailed"
    assert operator.condition("Available")["status"] == "True"
    (fetch,) = operator.cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]["initContainers"]
    assert f"--revision={COMMIT}" in fetch["args"]
    assert operator.cluster.the(DEPLOYMENT)["spec"]["replicas"] == 2, "what no plan decides follows the spec"
    assert operator.condition("Reconciling")["reason"] == "DownloadFailed", "it may pass"


WAITING: dict[str, tuple[Manifest, str, str]] = {
    "a claim that is not there": (
        {
            "conditions": [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": '0/1 nodes are available: persistentvolumeclaim "models" not found.',
                }
            ]
        },
        "VolumePending",
        "models does not exist",
    ),
    "an image that is not there": (
        {
            "containerStatuses": [
                {"name": "inspect-model", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such tag"}}}
            ]
        },
        "ImagePullFailed",
        "registry.example.com/runtime:1",
    ),
}


@pytest.mark.parametrize("name", WAITING)
async def test_what_the_pod_waits_for_is_said(name: str) -> None:
    status, reason, words = WAITING[name]
    operator = await under_way(manifest(model=model(persistentVolumeClaim={"claimName": "models"})))
    job = the_job(operator.cluster)
    pod = pod_of("x", job["spec"]["template"], ready=False, **status)
    pod["metadata"]["ownerReferences"] = [{"kind": "Job", "name": "x", "uid": job["metadata"]["uid"]}]
    operator.cluster.put(pod)
    await operator.turn()
    assert ready_reason(operator) == reason
    assert words in operator.condition("Ready")["message"]
    assert len(operator.cluster.all(JOB)) == 1, "it waits on"


async def test_a_job_that_ended_without_a_pod_reports_the_message_of_the_job() -> None:
    operator = await under_way()
    failed = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "Job was active too long"}
    name = the_job(operator.cluster)["metadata"]["name"]
    operator.cluster.set_status(JOB, name, {"conditions": [failed | {"lastTransitionTime": operator.now}]})
    await operator.turn()
    assert ready_reason(operator) == "DownloadFailed"
    assert "Job was active too long" in operator.condition("Ready")["message"]


async def test_a_complete_job_whose_pod_is_not_seen_yet_is_waited_for_and_then_done_again() -> None:
    """Two watches: the Job's may be ahead of the pod's. A pod that was deleted never comes."""
    operator = await under_way()
    name = the_job(operator.cluster)["metadata"]["name"]
    complete = {"type": "Complete", "status": "True", "lastTransitionTime": "2025-01-01T00:00:00Z"}
    operator.cluster.set_status(JOB, name, {"conditions": [complete]})
    await operator.turn()
    assert ready_reason(operator) == "Inspecting"
    assert operator.retries[-1].at_least_seconds > 0
    operator.now = "2025-01-01T00:01:00Z"
    await operator.turn()
    assert len(operator.cluster.all(JOB)) == 2
    await operator.settle()
    assert ready_reason(operator) == "Ready"


async def test_somebody_elses_job_of_that_name_is_left_alone() -> None:
    operator = await under_way()
    job = the_job(operator.cluster)
    operator.cluster.remove(JOB, job["metadata"]["name"])
    foreign = {"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": {"metadata": {}, "spec": {}}}}
    metadata = {"name": job["metadata"]["name"], "namespace": "team"}
    operator.cluster.put(foreign | {"metadata": metadata})
    await operator.turn()
    assert ready_reason(operator) == "NameConflict"


async def test_a_deletion_takes_everything_along() -> None:
    operator = await served(manifest(model=hub()))
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    operator.cluster.collect_garbage()
    for kind in (CONTROLLER_REVISION, CONFIG_MAP, JOB, SERVICE_ACCOUNT):
        assert operator.cluster.all(kind) == []
