"""A model is inspected once, by a Job, before anything is planned for it; what fails is said in the pod's own words."""

from __future__ import annotations

import json

import pytest

from millstream_operator.kube.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    LLM_DEPLOYMENT,
    NETWORK_POLICY,
    POD,
    SERVICE_ACCOUNT,
    Kind,
)
from millstream_operator.rendering.inspection_record import HISTORY_LIMIT
from tests.support.fake_operator import COMMIT, TINY_LLAMA, FakeOperator, answer_of, respec, served
from tests.support.inspected_models import (
    DIGEST,
    TOKEN,
    Manifest,
    hub,
    inspections,
    model,
    ready_reason,
    the_job,
    under_way,
)
from tests.support.llmdeployments import manifest


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


@pytest.mark.parametrize("kind", [SERVICE_ACCOUNT, NETWORK_POLICY], ids=lambda kind: kind.kind)
async def test_what_its_pod_needs_is_repaired_while_it_waits(kind: Kind) -> None:
    operator = await under_way()
    operator.cluster.remove(kind, "demo")
    await operator.turn()
    assert operator.cluster.get(kind, "demo") is not None


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
    operator = await under_way(manifest(model=hub(), speculation={"method": "EAGLE"}))
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
