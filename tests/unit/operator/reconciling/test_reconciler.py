"""The reconciler against a fake cluster: what it creates, pins, prunes and reports. Repair is in test_repair.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.kube.client import ApiError
from millstream_operator.kube.kinds import (
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    LLM_DEPLOYMENT,
    NETWORK_POLICY,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    SERVICE_ACCOUNT,
)
from millstream_operator.rendering.pod_defaults import PodDefaults
from tests.support.fake_cluster import FakeCluster, Fault
from tests.support.fake_operator import FakeOperator, respec, served, world
from tests.support.llmdeployments import NAMESPACE, full_manifest, manifest

Manifest = dict[str, Any]
CHILDREN = (SERVICE_ACCOUNT, NETWORK_POLICY, SERVICE, DEPLOYMENT, CONTROLLER_REVISION)


def runtime_image(cluster: FakeCluster) -> str:
    image: str = cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]["containers"][0]["image"]
    return image


def mounted_boot_config(cluster: FakeCluster) -> Manifest:
    """The boot configuration of the pods of the Deployment."""
    volumes = cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]["volumes"]
    volume = next(volume for volume in volumes if volume["name"] == "config")
    name = volume["projected"]["sources"][0]["configMap"]["name"]
    found: Manifest = json.loads(cluster.the(CONFIG_MAP, name)["data"]["boot.json"])
    return found


# Create


async def test_one_object_becomes_all_its_children_and_gets_ready() -> None:
    operator = await served()
    assert all(operator.cluster.get(kind, "demo") for kind in CHILDREN if kind is not CONTROLLER_REVISION)
    assert len(operator.cluster.all(CONTROLLER_REVISION)) == 1
    status = operator.cluster.the(LLM_DEPLOYMENT)["status"]
    assert (status["observedGeneration"], status["availableReplicas"]) == (1, 1)
    assert status["url"] == "http://demo.team.svc"


async def test_the_record_is_written_before_the_deployment_that_runs_it() -> None:
    operator = FakeOperator(world())
    await operator.turn()
    kinds = [kind for _, kind in operator.writes]
    assert kinds[0] == "ControllerRevision"
    assert kinds.index("Deployment") > kinds.index("ServiceAccount")
    assert kinds[-1] == "LLMDeployment/status"


def full() -> Manifest:
    """Every field, within what the model of the tests allows."""
    spec = full_manifest()
    spec["spec"]["engine"]["maxModelLen"] = 2048
    return spec


async def test_a_full_spec_is_applied_too() -> None:
    operator = await served(full())
    assert operator.cluster.get(POD_DISRUPTION_BUDGET, "demo") is not None


async def test_nothing_is_written_while_nothing_changes() -> None:
    operator = await served()
    for _ in range(5):
        await operator.turn()
    assert operator.client.requests == [], "a steady state does not even read"


async def test_a_restarted_operator_writes_nothing_in_a_steady_state() -> None:
    cluster = (await served(full())).cluster
    restarted = FakeOperator(cluster)
    await restarted.settle()
    assert restarted.client.written == []
    read = {request.kind for request in restarted.client.requests}
    # Whose a pod is; what was measured before; whether another's Service selects the labels that its spec gives pods.
    assert read <= {"ReplicaSet", "ConfigMap", "Service"}


async def test_time_that_passes_writes_nothing() -> None:
    operator = await served()
    operator.now = "2025-06-01T00:00:00Z"
    await operator.turn()
    assert operator.writes == []


# Update


async def test_a_changed_spec_reaches_the_pods_by_a_new_revision() -> None:
    operator = await served()
    respec(operator.cluster, engine={"maxNumSeqs": 8})
    await operator.settle()
    assert mounted_boot_config(operator.cluster)["max_num_seqs"] == 8
    assert sorted(record["revision"] for record in operator.cluster.all(CONTROLLER_REVISION)) == [1, 2]
    assert operator.condition("Ready")["observedGeneration"] == 2


async def test_a_field_that_is_taken_out_is_taken_out_of_the_child() -> None:
    operator = await served(manifest(podTemplate={"spec": {"nodeSelector": {"disk": "ssd"}}}))
    respec(operator.cluster, podTemplate=None)
    await operator.settle()
    assert "nodeSelector" not in operator.cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]


async def test_scaling_changes_the_number_of_pods_and_nothing_about_them() -> None:
    operator = await served()
    before = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    respec(operator.cluster, replicas=3)
    await operator.settle()
    after = operator.cluster.the(DEPLOYMENT)["spec"]
    assert (after["replicas"], after["template"]) == (3, before)
    assert len(operator.cluster.all(CONTROLLER_REVISION)) == 1


async def test_a_longer_deadline_restarts_no_pod() -> None:
    operator = await served()
    before = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    respec(operator.cluster, rollout={"progressDeadline": "3h"})
    await operator.settle()
    after = operator.cluster.the(DEPLOYMENT)["spec"]
    assert (after["progressDeadlineSeconds"], after["template"]) == (10800, before)


async def test_there_and_back_again_ends_in_the_first_revision_without_a_copy() -> None:
    operator = await served()
    first = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    respec(operator.cluster, engine={"maxNumSeqs": 8})
    await operator.settle()
    respec(operator.cluster, engine=None)
    await operator.settle()
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] == first
    assert sorted(record["revision"] for record in operator.cluster.all(CONTROLLER_REVISION)) == [2, 3]


async def test_old_revisions_are_pruned_and_the_current_one_never() -> None:
    operator = await served()
    for sequences in range(1, 9):
        respec(operator.cluster, engine={"maxNumSeqs": sequences})
        await operator.settle()
    assert sorted(record["revision"] for record in operator.cluster.all(CONTROLLER_REVISION)) == [6, 7, 8, 9]


async def test_a_child_that_is_no_longer_wanted_goes() -> None:
    operator = await served(manifest(replicas=2))
    assert operator.cluster.get(POD_DISRUPTION_BUDGET, "demo") is not None
    respec(operator.cluster, replicas=1)
    await operator.settle()
    assert operator.cluster.get(POD_DISRUPTION_BUDGET, "demo") is None


async def test_another_port_replaces_the_old_one() -> None:
    operator = await served()
    respec(operator.cluster, service={"port": 8080})
    await operator.settle()
    assert [port["port"] for port in operator.cluster.the(SERVICE)["spec"]["ports"]] == [8080]


# Pinning


async def test_another_default_image_restarts_nothing_until_the_spec_changes() -> None:
    cluster = (await served()).cluster
    newer = FakeOperator(cluster, image="registry.example.com/runtime:2", pods=PodDefaults(priority_class_name="high"))
    await newer.settle()
    assert newer.writes == [("apply", "LLMDeployment/status")], "it is reported, and nothing else is done"
    assert newer.condition("PlanOutdated")["reason"] == "NewDefaults"
    assert runtime_image(cluster) == "registry.example.com/runtime:1"
    respec(cluster, replicas=2)
    await newer.settle()
    assert runtime_image(cluster) == "registry.example.com/runtime:1", "scaling is no reason either"
    respec(cluster, engine={"maxNumSeqs": 8})
    await newer.settle()
    assert runtime_image(cluster) == "registry.example.com/runtime:2"
    assert cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]["priorityClassName"] == "high"
    assert newer.condition("PlanOutdated") == {}


# Delete


async def test_a_deleted_object_is_left_to_the_garbage_collector() -> None:
    operator = await served()
    assert not operator.cluster.the(LLM_DEPLOYMENT)["metadata"].get("finalizers")
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    operator.cluster.collect_garbage()
    await operator.turn()
    assert operator.client.requests == []
    assert not any(operator.cluster.all(kind) for kind in CHILDREN)


async def test_an_object_that_is_being_deleted_is_not_repaired() -> None:
    operator = await served()
    operator.cluster.edit(
        LLM_DEPLOYMENT, "demo", lambda live: live["metadata"].update(deletionTimestamp="2025-01-01T00:00:00Z")
    )
    operator.cluster.remove(SERVICE, "demo")
    await operator.turn()
    assert operator.writes == [("apply", "LLMDeployment/status")], "which says that it is being deleted"


async def test_a_namesakes_children_are_waited_for_and_not_taken_over() -> None:
    """Deleted and made again at once: the garbage collector may be slower than the operator."""
    operator = await served()
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    again = manifest()
    again["metadata"]["uid"] = "another-uid"
    operator.cluster.put(again)
    before = operator.cluster.the(SERVICE_ACCOUNT)
    await operator.turn()
    assert "to be deleted" in str(operator.retries[-1])
    assert operator.cluster.the(SERVICE_ACCOUNT) == before
    await operator.settle()
    assert operator.cluster.the(SERVICE_ACCOUNT)["metadata"]["ownerReferences"][0]["uid"] == "another-uid"
    assert operator.condition("Ready")["status"] == "True"


async def test_a_namesakes_child_that_waits_for_a_finalizer_is_named_and_followed_when_it_is_gone() -> None:
    """Its controller may be gone, and nothing but the status tells."""
    operator = await served()
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    again = manifest()
    again["metadata"]["uid"] = "another-uid"
    operator.cluster.put(again)
    operator.cluster.collect_garbage()
    old = {"deletionTimestamp": "2025-01-01T00:00:00Z", "finalizers": ["example.com/a", "example.com/b"]}
    operator.cluster.put(service := _old_service(old))
    await operator.turn()
    await operator.turn()
    ready = operator.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Starting")
    assert "Service demo" in ready["message"]
    assert "example.com/a, example.com/b" in ready["message"]
    assert operator.condition("Reconciling")["reason"] == "Starting"
    assert not operator.cluster.all(DEPLOYMENT), "no pod before its Service"
    operator.client.requests.clear()
    await operator.turn()
    assert operator.writes == []
    operator.cluster.remove(SERVICE, service["metadata"]["name"])
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"


def _old_service(metadata: Manifest) -> Manifest:
    owner = {"apiVersion": "millstream.dev/v1alpha1", "kind": "LLMDeployment", "name": "demo", "controller": True}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": "demo",
            "namespace": NAMESPACE,
            "labels": {"millstream.dev/deployment": "demo"},
            "ownerReferences": [owner | {"uid": "the-old-uid"}],
            **metadata,
        },
        "spec": {"ports": [{"name": "http", "port": 80}]},
    }


# An invalid spec


async def test_a_stored_spec_that_cannot_be_read_is_told_and_what_runs_runs_on() -> None:
    """An older CRD, or an API server without validation, may have let it in."""
    operator = await served()
    before = operator.cluster.the(DEPLOYMENT)
    respec(operator.cluster, engine={"maxNumSeqs": -1})
    await operator.turn()
    ready = operator.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "InvalidSpec")
    assert "spec.engine.maxNumSeqs is -1" in ready["message"]
    assert operator.condition("Stalled")["status"] == "True"
    assert operator.condition("Available")["status"] == "True", "the last good pods serve"
    assert operator.cluster.the(DEPLOYMENT) == before
    assert operator.writes == [("apply", "LLMDeployment/status")]
    await operator.turn()
    assert len(operator.writes) == 1
    respec(operator.cluster, engine=None)
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    assert operator.condition("Stalled") == {}


# A spec that cannot be planned or run


async def test_what_the_runtime_cannot_do_is_refused_by_name_and_the_last_good_pods_serve_on() -> None:
    operator = await served()
    before = operator.cluster.the(DEPLOYMENT)
    respec(operator.cluster, speculation={"method": "EAGLE"})
    await operator.turn()
    ready = operator.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "UnsupportedByRuntime")
    assert "draftHead=EAGLE" in ready["message"]
    assert operator.condition("Stalled")["reason"] == "UnsupportedByRuntime"
    assert operator.condition("Available")["status"] == "True"
    assert operator.cluster.the(LLM_DEPLOYMENT)["status"]["plan"]["requires"] == ["draftHead=EAGLE"]
    assert operator.cluster.the(DEPLOYMENT) == before
    assert operator.writes == [("apply", "LLMDeployment/status")]
    await operator.turn()
    assert len(operator.writes) == 1, "reported once"
    respec(operator.cluster, speculation=None)
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    assert operator.cluster.the(LLM_DEPLOYMENT)["status"]["plan"]["requires"] == []


async def test_what_serves_is_repaired_and_scaled_while_a_newer_spec_is_refused() -> None:
    operator = await served()
    template = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    respec(operator.cluster, speculation={"method": "EAGLE"}, replicas=3)
    operator.cluster.remove(DEPLOYMENT, "demo")
    await operator.settle()
    repaired = operator.cluster.the(DEPLOYMENT)["spec"]
    assert (repaired["replicas"], repaired["template"]) == (3, template)
    assert operator.condition("Ready")["reason"] == "UnsupportedByRuntime"


async def test_a_first_spec_that_cannot_be_run_makes_nothing() -> None:
    operator = FakeOperator(world(manifest(speculation={"method": "EAGLE"})))
    await operator.turn()
    assert operator.condition("Ready")["reason"] == "UnsupportedByRuntime"
    assert operator.writes == [("apply", "LLMDeployment/status")]


# What the API server refuses

REFUSALS = {
    "quota": (ApiError(403, "Forbidden", "exceeded quota: pods"), "QuotaExceeded"),
    "forbidden": (ApiError(403, "Forbidden", "no rights"), "AdmissionDenied"),
    "webhook": (ApiError(400, "BadRequest", 'admission webhook "x" denied the request'), "AdmissionDenied"),
    "invalid": (ApiError(422, "Invalid", "spec: Invalid value"), "ApplyRefused"),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_a_refused_child_is_one_reason_and_is_tried_again(name: str) -> None:
    error, reason = REFUSALS[name]
    operator = FakeOperator(world(), fault=Fault(3, error))
    await operator.turn()
    assert operator.condition("Ready")["reason"] == reason
    assert error.message in operator.condition("Ready")["message"]
    assert operator.retries[-1].at_least_seconds > 0
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"


async def test_a_policy_that_cannot_judge_yet_is_asked_again_soon() -> None:
    """Not after the half minute of what waits for a person: the API server learns of a new CRD meanwhile."""
    words = "ValidatingAdmissionPolicy 'millstream-namespaces.policy.millstream.dev' denied request: "
    error = ApiError(403, "Forbidden", f"{words}failed to configure policy: failed to find resource")
    operator = FakeOperator(world(), fault=Fault(3, error))
    await operator.turn()
    assert operator.condition("Ready")["reason"] == "AdmissionUnavailable"
    assert operator.retries[-1].at_least_seconds == 1
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"


async def test_a_namespace_that_is_going_is_left_in_peace() -> None:
    gone = ApiError(403, "Forbidden", "namespace team is being terminated")
    operator = FakeOperator(world(), fault=Fault(0, gone))
    await operator.turn()
    assert operator.retries == []
    assert len(operator.client.written) == 1
