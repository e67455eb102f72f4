"""A model is inspected once, by a Job, before anything is planned for it; what fails is said in the pod's own words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.facts.inspection import LONGEST_RETRY_SECONDS, retry_seconds
from millstream_operator.kube.kinds import (
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    JOB,
    LLM_DEPLOYMENT,
    NETWORK_POLICY,
    POD,
    SERVICE_ACCOUNT,
)
from millstream_operator.rendering.inspection_record import HISTORY_LIMIT, is_inspection
from tests.support.fake_cluster import FakeCluster, pod_of
from tests.support.fake_operator import COMMIT, TINY_LLAMA, FakeOperator, answer_of, respec, served, world
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
DIGEST = "sha256:" + "ab" * 32
TOKEN = {"tokenSecretRef": {"name": "hub", "key": "token"}}
UNAUTHORIZED = json.dumps({"reason": "DownloadUnauthorized", "message": "The hub answered HTTP 401 to org/name."})


def model(**source: Any) -> Manifest:
    return {"source": source or {"huggingFace": {"repository": "org/name"}}}


def hub(**fields: Any) -> Manifest:
    return model(huggingFace={"repository": "org/name", **fields})


def inspections(cluster: FakeCluster) -> list[Manifest]:
    return [record for record in cluster.all(CONFIG_MAP) if is_inspection(record)]


def the_job(cluster: FakeCluster) -> Manifest:
    (job,) = cluster.all(JOB)
    return job


def ready_reason(operator: FakeOperator) -> str:
    return str(operator.condition("Ready")["reason"])


async def under_way(stored: Manifest | None = None) -> FakeOperator:
    """An operator that has begun to inspect the model of the one LLMDeployment."""
    operator = FakeOperator(world(stored or manifest(model=hub())))
    await operator.turn()
    return operator


# The way of one inspection


async def test_before_the_plan_there_is_only_the_job_and_what_its_pod_needs() -> None:
    operator = await under_way()
    kinds = [kind for _, kind in operator.writes]
    assert kinds == ["ServiceAccount", "NetworkPolicy", "Job", "LLMDeployment/status"]
    assert operator.cluster.get(DEPLOYMENT, "demo") is None
    planned, ready = operator.condition("Planned"), operator.condition("Ready")
    assert (planned["status"], planned["reason"], ready["reason"]) == ("False", "Inspecting", "Inspecting")
    assert "org/name at main" in ready["message"]
    assert operator.condition("Reconciling")["status"] == "True"
    assert operator.condition("Stalled") == {}, "no person has to act"


async def test_while_it_runs_nothing_is_written_or_asked() -> None:
    operator = await under_way()
    operator.client.requests.clear()
    await operator.turn()
    await operator.turn()
    assert operator.client.requests == []


async def test_the_answer_is_kept_the_job_goes_and_the_commit_is_what_all_pods_load() -> None:
    operator = await served(manifest(model=hub()))
    cluster = operator.cluster
    assert cluster.all(JOB) == []
    assert [pod["metadata"]["labels"]["millstream.dev/role"] for pod in cluster.all(POD)] == ["leader"]
    (fetch,) = cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]["initContainers"]
    assert f"--revision={COMMIT}" in fetch["args"]
    assert cluster.the(LLM_DEPLOYMENT)["status"]["model"] == {"servedName": "demo", "resolvedRevision": COMMIT}
    (record,) = inspections(cluster)
    assert json.loads(record["data"]["answer.json"]) == json.loads(TINY_LLAMA)
    assert record["immutable"] is True
    assert record["metadata"]["ownerReferences"][0]["kind"] == "LLMDeployment"


@pytest.mark.parametrize(
    "change",
    [{"engine": {"maxNumSeqs": 8}}, {"model": hub(**TOKEN)}, {"model": hub() | {"servedName": "other"}}],
    ids=["engine", "token", "name"],
)
async def test_a_source_is_inspected_once_whatever_else_changes(change: Manifest) -> None:
    operator = await served(manifest(model=hub()))
    respec(operator.cluster, **change)
    await operator.settle(inspected="no inspection is started")
    assert ready_reason(operator) == "Ready"
    assert ("apply", "Job") not in operator.writes
    (fetch,) = operator.cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]["initContainers"]
    assert f"--revision={COMMIT}" in fetch["args"]


async def test_back_to_an_earlier_revision_is_back_to_its_weights_without_a_job() -> None:
    operator = await served(manifest(model=hub(revision="v1")))
    before = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    respec(operator.cluster, model=hub(revision="v2"))
    await operator.settle(inspected=answer_of("f" * 40))
    assert operator.cluster.the(LLM_DEPLOYMENT)["status"]["model"]["resolvedRevision"] == "f" * 40
    operator.client.requests.clear()
    respec(operator.cluster, model=hub(revision="v1"))
    await operator.settle(inspected="no inspection is started")
    assert ("apply", "Job") not in operator.writes
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] == before


async def test_only_so_many_answers_are_kept() -> None:
    operator = await served(manifest(model=hub()))
    for number in range(HISTORY_LIMIT + 2):
        respec(operator.cluster, model=hub(revision=f"v{number}"))
        await operator.settle()
    assert len(inspections(operator.cluster)) == HISTORY_LIMIT
    assert ready_reason(operator) == "Ready"


async def test_a_new_operator_finds_the_answer_and_starts_no_inspection() -> None:
    operator = await served(manifest(model=hub()))
    restarted = FakeOperator(operator.cluster, image="registry.example.com/runtime:2")
    await restarted.turn()
    assert restarted.client.written == []


async def test_what_was_pinned_before_there_were_inspections_is_left_alone() -> None:
    """An upgrade of the operator restarts nothing, and starts no Job either."""
    operator = await served(manifest(model=hub()))
    for record in inspections(operator.cluster):
        operator.cluster.remove(CONFIG_MAP, record["metadata"]["name"])
    restarted = FakeOperator(operator.cluster)
    await restarted.turn()
    assert restarted.client.written == []


# What is inspected, and what is not


async def test_a_small_model_of_the_image_on_a_cpu_starts_without_a_job() -> None:
    operator = await served(manifest())
    assert inspections(operator.cluster) == []


async def test_a_folder_of_the_image_is_looked_into_where_the_plan_depends_on_it() -> None:
    operator = await under_way(manifest(accelerator={"type": "GPU"}))
    container = the_job(operator.cluster)["spec"]["template"]["spec"]["containers"][0]
    assert container["args"] == ["inspect", "--path=/models/demo-chat"]
    await operator.settle(inspected=answer_of(None))
    assert ready_reason(operator) == "Ready"
    assert "resolvedRevision" not in operator.cluster.the(LLM_DEPLOYMENT)["status"]["model"]


async def test_a_plan_that_is_refused_whatever_the_model_is_inspects_nothing() -> None:
    operator = await under_way(manifest(model=hub(), speculation={"method": "NGram"}))
    assert operator.writes == [("apply", "LLMDeployment/status")]
    assert ready_reason(operator) == "UnsupportedByRuntime"


async def test_an_image_is_pinned_by_digest_and_its_tag_looked_up_again_only_where_asked() -> None:
    image = {"reference": "registry.example.com/model:1"}
    operator = await under_way(manifest(model=model(image=image)))
    await operator.settle(inspected=answer_of(DIGEST))
    (fetch,) = operator.cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]["initContainers"]
    assert f"--image=registry.example.com/model:1@{DIGEST}" in fetch["args"]
    operator.client.requests.clear()
    respec(operator.cluster, engine={"maxNumSeqs": 8})
    await operator.settle(inspected="no inspection is started")
    assert ("apply", "Job") not in operator.writes
    respec(operator.cluster, model=model(image=image | {"pullPolicy": "Always"}))
    newer = "sha256:" + "cd" * 32
    await operator.settle(inspected=answer_of(newer))
    assert operator.cluster.the(LLM_DEPLOYMENT)["status"]["model"]["resolvedRevision"] == newer


async def test_a_shape_from_a_config_map_needs_neither_the_volume_nor_a_right_on_config_maps() -> None:
    source = model(persistentVolumeClaim={"claimName": "models"})
    operator = await under_way(manifest(model=source | {"configMapRef": {"name": "shape", "key": "config.json"}}))
    pod = the_job(operator.cluster)["spec"]["template"]["spec"]
    assert [next(iter(volume.keys() - {"name"})) for volume in pod["volumes"]] == ["emptyDir", "configMap"]
    (flag,) = pod["containers"][0]["args"][1:]
    assert flag.startswith("--config=")
    assert flag.endswith("/shape/config.json")
    await operator.settle(inspected=answer_of(None))
    assert ready_reason(operator) == "Ready"


async def test_what_the_model_needs_is_known_before_a_pod_is_made() -> None:
    """The planner sees the shape: 4 GiB of memory do not hold this one."""
    operator = await under_way()
    await operator.settle(inspected=answer_of(hidden_size=8192, num_hidden_layers=80, intermediate_size=28672))
    assert ready_reason(operator) == "Infeasible"
    assert operator.cluster.get(DEPLOYMENT, "demo") is None
    assert operator.cluster.all(JOB) == [], "read, and deleted"


LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16}


def answer_with(quantization: Manifest | None = None, weights: Manifest | None = None, **config: Any) -> str:
    answer = json.loads(answer_of(**config)) | {"quantization_config": quantization}
    return json.dumps(answer | ({"weights": weights} if weights is not None else {}))


async def test_an_awq_folder_is_refused_on_a_cpu_before_anything_is_created() -> None:
    operator = await under_way(manifest(model=model(persistentVolumeClaim={"claimName": "models"})))
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32}
    await operator.settle(inspected=answer_with(awq))
    ready = operator.condition("Ready")
    assert ready["reason"] == "UnsupportedByRuntime"
    assert "AWQ weights (quantization=AWQ)" in ready["message"]
    assert operator.cluster.get(DEPLOYMENT, "demo") is None
    assert operator.cluster.all(CONTROLLER_REVISION) == []
    assert operator.cluster.the(LLM_DEPLOYMENT)["status"]["plan"]["summary"] == "CPU TP1 AWQ"


async def test_a_format_that_is_not_read_is_unsupported_by_its_name() -> None:
    operator = await under_way()
    operator.cluster.run_jobs(answer_with({"quant_method": "modelopt", "quant_algo": "NVFP4"}))
    await operator.turn()
    ready = operator.condition("Ready")
    assert (ready["reason"], "NVFP4" in ready["message"]) == ("UnsupportedByRuntime", True)


@pytest.mark.parametrize(
    ("held", "reason"),
    [(34_608_128, "Ready"), (34_608_128 * 2, "CheckpointInvalid"), (19_000_000, "CheckpointInvalid")],
)
async def test_weights_files_of_another_size_than_the_config_are_refused_with_both_figures(
    held: int, reason: str
) -> None:
    operator = await under_way()
    weights = {"file_bytes": 2 * held, "tensor_bytes": 2 * held, "elements_by_dtype": {"BF16": held}}
    operator.cluster.run_jobs(answer_with(None, weights, **LARGE))
    await operator.turn()
    ready = operator.condition("Ready")
    if reason == "Ready":
        await operator.settle(inspected="no inspection is started")
        assert ready_reason(operator) == reason
    else:
        assert ready["reason"] == reason
        assert "describes 0.07 GB of weights" in ready["message"]
        assert f"hold {held * 2 / 1e9:.2f} GB" in ready["message"]
        assert inspections(operator.cluster) == [], "the answer is not kept, so a corrected ConfigMap is read again"


async def test_a_record_of_an_older_operator_that_lies_refuses_the_next_plan_and_keeps_what_serves() -> None:
    operator = await served(manifest(model=hub()))
    (record,) = inspections(operator.cluster)
    answer = json.loads(record["data"]["answer.json"])
    answer["config"]["num_hidden_layers"] = 10**6
    stored = {"answer.json": json.dumps(answer)}
    name = record["metadata"]["name"]
    operator.cluster.edit(CONFIG_MAP, name, lambda one: one.pop("immutable"))  # as only a deletion could
    operator.cluster.edit(CONFIG_MAP, name, lambda one: one.update(data=stored))
    await operator.settle(inspected="no inspection is started")
    assert ready_reason(operator) == "Ready"
    respec(operator.cluster, engine={"maxNumSeqs": 8})
    await operator.settle(inspected="no inspection is started")
    ready = operator.condition("Ready")
    assert ready["reason"] == "CheckpointInvalid"
    assert "num_hidden_layers is 1000000" in ready["message"]
    assert operator.condition("Available")["status"] == "True"


async def test_the_pod_is_as_restricted_as_the_models_own_and_reaches_what_it_reaches() -> None:
    template = {
        "spec": {
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"key": "spot", "operator": "Exists"}],
            "imagePullSecrets": [{"name": "registry"}],
            "containers": [{"name": "runtime", "env": [{"name": "HF_ENDPOINT", "value": "http://hub"}]}],
        }
    }
    operator = await under_way(manifest(model=hub(**TOKEN), podTemplate=template))
    job = the_job(operator.cluster)
    pod = job["spec"]["template"]["spec"]
    await operator.settle()
    serving = operator.cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]
    for field in ("serviceAccountName", "automountServiceAccountToken", "securityContext", "nodeSelector"):
        assert pod[field] == serving[field], field
    for field in ("tolerations", "imagePullSecrets"):
        assert pod[field] == serving[field], field
    (container,), (runtime,) = pod["containers"], serving["containers"]
    for field in ("image", "env", "securityContext"):
        assert container[field] == runtime[field], field
    assert "token" not in [variable["name"].lower() for variable in container["env"]]
    assert pod["restartPolicy"] == "Never"
    assert {"backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished"} <= job["spec"].keys()
    policy = operator.cluster.the(NETWORK_POLICY)["spec"]["podSelector"]["matchLabels"]
    assert policy.items() <= job["spec"]["template"]["metadata"]["labels"].items(), "it may call out as they may"


# What fails


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


ANSWERS = {
    "no JSON": ("killed", 0, "InvalidConfig", "version 1"),
    "another version": (json.dumps({"version": 2, "config": {}}), 0, "InvalidConfig", "version 1"),
    "an unknown family": (answer_of(model_type="mamba"), 0, "UnsupportedByRuntime", "mamba"),
    "an impossible shape": (answer_of(num_key_value_heads=3), 0, "CheckpointInvalid", "must divide"),
    "no words": ("", 137, "DownloadFailed", "exit code 137"),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_that_is_none_is_one_reason_and_is_not_kept(name: str) -> None:
    answer, code, reason, words = ANSWERS[name]
    operator = await under_way()
    operator.cluster.run_jobs(answer, code)
    await operator.turn()
    assert ready_reason(operator) == reason
    assert words in operator.condition("Ready")["message"]
    assert inspections(operator.cluster) == []


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
