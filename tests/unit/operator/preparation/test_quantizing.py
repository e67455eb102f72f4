"""A model is quantized in the cluster once, by a Job that writes into the cache, before a pod of it is planned."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.api.load import ManifestError
from millstream_operator.kube.kinds import CONFIG_MAP, DEPLOYMENT, JOB, PERSISTENT_VOLUME_CLAIM, POD
from millstream_operator.planning.restart_fields import input_hash
from tests.support.fake_cluster import pod_of
from tests.support.fake_operator import COMMIT, FakeOperator, answer_of, answer_to, respec, served, world
from tests.support.llmdeployments import deployment, manifest
from tests.support.prepared_models import (
    CACHE,
    CALIBRATED,
    LOCAL,
    MADE,
    Manifest,
    arguments,
    commands,
    dataset,
    journal,
    preparing,
    records,
    until,
)

ONLY_MADE: Manifest = {"model": LOCAL | CACHE, "quantization": CALIBRATED}
HUB: Manifest = {"source": {"huggingFace": {"repository": "org/name"}}}


def the_job(operator: FakeOperator, command: str = "quantize") -> Manifest:
    (job,) = [job for job in operator.cluster.all(JOB) if arguments(job)[0] == command]
    return job


async def test_the_job_quantizes_the_source_into_the_cache_under_the_restricted_profile() -> None:
    operator = await preparing("quantize", **ONLY_MADE)
    spec = the_job(operator)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    out = next(word for word in container["args"] if word.startswith("--out=")).removeprefix("--out=")
    assert container["args"][:2] == ["quantize", "/models/demo-chat"]
    assert "--method=awq" in container["args"]
    assert "--calibration=/var/run/millstream/dataset/calibration/data.jsonl" in container["args"]
    assert out.startswith("/models/quantized/awq-")
    volume = next(one for one in spec["volumes"] if one["name"] == "quantized")
    mount = next(one for one in container["volumeMounts"] if one["name"] == "quantized")
    assert volume["persistentVolumeClaim"] == {"claimName": "demo-model-cache"}
    assert (mount["mountPath"], mount.get("readOnly")) == ("/models/quantized", None)
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert (spec["securityContext"]["runAsNonRoot"], spec["automountServiceAccountToken"]) == (True, False)
    assert operator.cluster.get(PERSISTENT_VOLUME_CLAIM, "demo-model-cache") is not None
    assert operator.cluster.get(DEPLOYMENT, "demo") is None, "no pod before the model is made"


async def test_the_job_that_quantizes_checks_what_the_gate_judges_by() -> None:
    operator = await preparing("quantize", **MADE)
    spec = the_job(operator)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    (checked,) = [one["value"] for one in container["env"] if one["name"] == "MILLSTREAM_CHECK_DATA"]
    assert checked == "/var/run/millstream/held-out/held-out/data.jsonl"
    (volume,) = [one for one in spec["volumes"] if one["name"] == "held-out"]
    assert volume["configMap"]["name"] == "held-out"
    assert {one["mountPath"] for one in container["volumeMounts"]} >= {"/var/run/millstream/held-out"}
    assert not any("check-data" in word for word in container["args"]), "an older image knows no such flag"


async def test_the_pods_load_the_folder_that_was_made_and_download_nothing() -> None:
    operator = await preparing("quantize", **ONLY_MADE)
    out = next(word for word in arguments(the_job(operator)) if word.startswith("--out=")).removeprefix("--out=")
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    spec = operator.cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]
    (mount,) = [one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "quantized"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/models/quantized", True)
    assert "initContainers" not in spec
    boots = [one["data"]["boot.json"] for one in operator.cluster.all(CONFIG_MAP) if "boot.json" in one["data"]]
    assert [json.loads(boot)["model"] for boot in boots] == [out]
    assert operator.status()["plan"]["quantization"] == "AWQ"


async def test_a_hub_model_is_downloaded_for_the_job_at_the_commit_of_the_inspection() -> None:
    operator = await preparing("quantize", model=HUB | CACHE, quantization=CALIBRATED)
    spec = the_job(operator)["spec"]["template"]["spec"]
    (fetch,) = spec["initContainers"]
    folder = f"/models/huggingFace/org--name-{COMMIT[:12]}"
    assert f"--revision={COMMIT}" in fetch["args"]
    assert f"--into={folder}" in fetch["args"]
    assert spec["containers"][0]["args"][1] == folder


async def test_the_status_says_which_job_quantizes_and_the_journal_has_the_bytes() -> None:
    operator = await preparing("quantize", **ONLY_MADE)
    await operator.turn()
    for kind in ("ModelReady", "Ready", "Planned"):
        found = operator.condition(kind)
        assert (found["status"], found["reason"]) == ("False", "Quantizing"), kind
    assert the_job(operator)["metadata"]["name"] in operator.condition("ModelReady")["message"]
    assert operator.condition("Reconciling")["status"] == "True"
    assert operator.status()["plan"]["quantization"] == "AWQ", "what is planned can be seen meanwhile"
    await operator.settle()
    assert journal(operator)[:2] == ["QuantizationStarted", "ModelQuantized"]
    made = next(one for one in operator.status()["decisions"] if one["type"] == "ModelQuantized")
    assert "0.12 MB of weights, 0.17 MB predicted" in made["message"], "what the pod measured, and what was predicted"


async def test_while_it_runs_nothing_is_written() -> None:
    operator = await preparing("quantize", **ONLY_MADE)
    await operator.turn()
    operator.client.requests.clear()
    await operator.turn()
    await operator.turn()
    assert operator.writes == []


async def test_the_old_pods_serve_until_the_model_is_made() -> None:
    operator = await served(manifest())
    before = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    respec(operator.cluster, **ONLY_MADE)
    await until(operator, "quantize")
    await operator.turn()
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] == before
    assert operator.condition("Available")["status"] == "True"
    assert operator.condition("ModelReady")["reason"] == "Quantizing"
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] != before


@pytest.mark.parametrize("change", [{"engine": {"maxNumSeqs": 8}}, {"replicas": 2}], ids=["engine", "replicas"])
async def test_a_model_is_made_once_whatever_else_changes(change: Manifest) -> None:
    operator = await served(manifest(**ONLY_MADE))
    respec(operator.cluster, **change)
    await operator.settle(inspected="no Job is started")
    assert operator.condition("Ready")["status"] == "True"
    assert ("apply", "Job") not in operator.writes


async def test_another_dataset_makes_another_folder_and_back_is_back_without_a_job() -> None:
    operator = await served(manifest(**ONLY_MADE))
    first = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    respec(operator.cluster, quantization={"method": "AWQ", "calibration": dataset("calibration-2")})
    await operator.settle()
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] != first
    assert len(records(operator)) == 2
    operator.client.requests.clear()
    respec(operator.cluster, quantization=CALIBRATED)
    await operator.settle(inspected="no Job is started")
    assert ("apply", "Job") not in operator.writes
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] == first


async def test_an_operator_that_starts_anew_finds_the_job_and_the_record() -> None:
    operator = await preparing("quantize", **ONLY_MADE)
    name = the_job(operator)["metadata"]["name"]
    second = FakeOperator(operator.cluster, image="registry.example.com/runtime:1")
    await second.turn()
    assert the_job(second)["metadata"]["name"] == name
    await second.settle()
    third = FakeOperator(operator.cluster, image="registry.example.com/runtime:2")
    await third.turn()
    assert third.client.written == []


async def test_a_spec_without_calibration_stops_the_job() -> None:
    operator = await preparing("quantize", **ONLY_MADE)
    respec(operator.cluster, quantization=None, model=LOCAL)
    await operator.settle()
    assert operator.cluster.all(JOB) == []
    assert operator.condition("Ready")["status"] == "True"


async def test_a_spec_that_goes_back_to_what_serves_stops_the_job() -> None:
    """It would quantize for hours, and no plan would use it."""
    operator = await served(manifest(**MADE))
    respec(operator.cluster, quantization=CALIBRATED | {"method": "GPTQ"})
    await operator.turn()
    assert commands(operator) == ["quantize"]
    respec(operator.cluster, quantization=MADE["quantization"])
    await operator.turn()
    assert commands(operator) == []
    assert operator.condition("Ready")["status"] == "True"


async def test_a_source_that_is_quantized_already_is_refused_before_a_job_runs_for_hours() -> None:
    stored = answer_of(None, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 64})
    operator = FakeOperator(world(manifest(**MADE)))
    await operator.settle(inspected=stored)
    ready = operator.condition("Ready")
    assert (ready["reason"], commands(operator)) == ("Infeasible", [])
    assert "Leave calibration out" in ready["message"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma2", "head_dim": 16}, "this model is a gemma2"),
        ({}, "packs layers whose inputs are multiples of 256, and this model has none"),
        ({"model_type": "mistral", "hidden_size": 256, "sliding_window": 512}, "no file of a model with sliding"),
    ],
    ids=["family", "widths", "windows"],
)
async def test_what_no_gguf_file_can_hold_is_refused_before_a_job_runs(config: Manifest, words: str) -> None:
    gguf = {"method": "GGUF", "calibration": dataset("c")}
    operator = FakeOperator(world(manifest(model=LOCAL | CACHE, quantization=gguf)))
    await operator.settle(inspected=answer_of(None, **config))
    ready = operator.condition("Ready")
    assert (ready["reason"], commands(operator)) == ("Infeasible", []), ready
    assert words in ready["message"]


@pytest.mark.parametrize("method", ["NF4", "GGUF", "RTN"])
async def test_formats_without_calibration_are_made_and_served(method: str) -> None:
    spec: Manifest = {"model": LOCAL | CACHE, "quantization": {"method": method, "calibration": dataset("c")}}
    operator = FakeOperator(world(manifest(**spec)))
    wide = answer_of(None, hidden_size=256, intermediate_size=512)
    for _ in range(12):
        await operator.turn()
        operator.cluster.run_jobs(lambda job: wide if arguments(job)[0] == "inspect" else answer_to(job))
        operator.cluster.roll_out()
    assert operator.condition("Ready")["status"] == "True", operator.condition("Ready")
    assert operator.status()["plan"]["quantization"] == {"RTN": "AWQ"}.get(method, method)
    assert "predicted" in next(one["message"] for one in operator.status()["decisions"] if "weights" in one["message"])


async def test_no_model_is_made_for_gpus_that_could_not_load_it() -> None:
    asked = CALIBRATED | {"method": "GGUF"}
    operator = FakeOperator(world(manifest(model=HUB | CACHE, quantization=asked, accelerator={"type": "GPU"})))
    await operator.settle(inspected=answer_of(None, hidden_size=256, intermediate_size=512))
    assert operator.condition("Ready")["reason"] == "UnsupportedByRuntime"
    assert commands(operator) == []


RWO_CACHE: Manifest = {"cache": {"size": "2Gi", "accessMode": "ReadWriteOnce"}}


@pytest.mark.parametrize("spec", [{}, {"rollout": {"strategy": "Availability"}}], ids=["Auto", "asked"])
async def test_a_cache_that_a_rollout_could_not_mount_is_refused_before_a_job_runs_for_hours(spec: Manifest) -> None:
    operator = await served(manifest(**spec))
    respec(operator.cluster, model=LOCAL | RWO_CACHE, quantization=CALIBRATED)
    await operator.settle()
    ready = operator.condition("Ready")
    assert (ready["reason"], records(operator)) == ("Infeasible", []), "nothing was made"
    assert "Use ReadWriteMany, or rollout.strategy ResourceAware" in ready["message"]
    assert (operator.condition("Stalled")["status"], operator.condition("Available")["status"]) == ("True", "True")
    respec(operator.cluster, rollout={"strategy": "ResourceAware"})
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"


# What fails


async def test_a_missing_dataset_is_named_with_its_config_map_and_tried_again() -> None:
    operator = await preparing("quantize", **ONLY_MADE)
    missing = "Cannot read --calibration /var/run/millstream/dataset/calibration/data.jsonl: No such file or directory."
    operator.cluster.run_jobs(json.dumps({"reason": "InvalidConfig", "message": missing}), 2)
    await operator.turn()
    found = operator.condition("ModelReady")
    assert found["reason"] == "InvalidConfig"
    assert "key data.jsonl of ConfigMap calibration (quantization.calibration)" in found["message"]
    operator.now = "2025-01-01T00:05:00Z"
    await operator.turn()
    assert len(operator.cluster.all(JOB)) == 2
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"


async def test_a_job_that_was_killed_for_memory_says_what_to_raise() -> None:
    operator = await served(manifest())
    respec(operator.cluster, **ONLY_MADE)
    await until(operator, "quantize")
    operator.cluster.run_jobs("", 137, reason="OOMKilled")
    await operator.turn()
    found = operator.condition("ModelReady")
    assert found["reason"] == "OutOfMemory"
    assert found["message"].startswith("Quantizing the model was stopped: the kernel killed it")
    assert "podTemplate.spec.containers[runtime].resources.limits.memory" in found["message"]
    assert operator.condition("Available")["status"] == "True"


async def test_an_evicted_job_is_one_reason_and_the_next_attempt_has_the_same_output() -> None:
    operator = await preparing("quantize", **ONLY_MADE)
    first = the_job(operator)
    evict(operator, first)
    await operator.turn()
    assert operator.condition("ModelReady")["reason"] == "Evicted"
    operator.now = "2025-01-01T00:05:00Z"
    await operator.turn()
    outs = [[word for word in arguments(job) if word.startswith("--out=")] for job in operator.cluster.all(JOB)]
    assert len(outs) == 2
    assert outs[0] == outs[1], "it goes on from the last whole layer"


DELETED = "was stopped: its pod was deleted. Another attempt follows."
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "message": "Eviction API: evicting"}


@pytest.mark.parametrize(
    ("pod", "reason", "words"),
    [
        (None, "PreparationFailed", DELETED),
        ({"metadata": {"deletionTimestamp": "2025-01-01T00:00:00Z"}}, "PreparationFailed", DELETED),
        ({"status": {"conditions": [DISRUPTED]}}, "Evicted", "was evicted: Eviction API: evicting."),
    ],
    ids=["gone", "terminating", "drained"],
)
async def test_a_pod_that_a_person_or_a_drain_took_is_said_and_the_next_attempt_goes_on(
    pod: Manifest | None, reason: str, words: str
) -> None:
    operator = await preparing("quantize", **ONLY_MADE)
    job = the_job(operator)
    if pod is not None:
        operator.cluster.put(stopped_pod(job, pod))
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "backoff limit"}
    conditions = [failed | {"lastTransitionTime": operator.now}]
    operator.cluster.set_status(JOB, job["metadata"]["name"], {"conditions": conditions})
    await operator.turn()
    found = operator.condition("ModelReady")
    assert (found["reason"], words in found["message"]) == (reason, True), found
    operator.now = "2025-01-01T00:05:00Z"
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"


def stopped_pod(job: Manifest, more: Manifest) -> Manifest:
    """A pod of the Job whose container ended on SIGTERM."""
    name = job["metadata"]["name"]
    pod = pod_of(f"{name}-x", job["spec"]["template"], ready=False)
    ended = {"name": "quantize-model", "state": {"terminated": {"exitCode": 143, "reason": "Error"}}}
    pod["status"] |= {"phase": "Failed", "containerStatuses": [ended]} | more.get("status", {})
    owner = {"kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
    pod["metadata"] |= {"ownerReferences": [owner]} | more.get("metadata", {})
    return pod


def evict(operator: FakeOperator, job: Manifest) -> None:
    name = job["metadata"]["name"]
    pod = pod_of(f"{name}-x", job["spec"]["template"], ready=False)
    pod["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    pod["metadata"]["ownerReferences"] = [{"kind": "Job", "name": name, "uid": job["metadata"]["uid"]}]
    operator.cluster.put(pod)
    failed = {"type": "Failed", "status": "True", "lastTransitionTime": operator.now, "message": "backoff limit"}
    operator.cluster.set_status(JOB, name, {"conditions": [failed]})


async def test_a_result_that_no_operator_reads_starts_nothing_else() -> None:
    operator = await preparing("quantize", **ONLY_MADE)
    operator.cluster.run_jobs('{"version": 9}')
    await operator.turn()
    found = operator.condition("ModelReady")
    assert (found["reason"], "image of the operator's own version" in found["message"]) == ("InvalidConfig", True)
    assert [
        pod for pod in operator.cluster.all(POD) if pod["metadata"]["labels"]["millstream.dev/role"] == "leader"
    ] == []


async def test_a_crash_after_any_answer_makes_the_model_once() -> None:
    """The record is written before the Job goes: an operator that died between the two finds the record."""
    operator = await preparing("quantize", **ONLY_MADE)
    operator.cluster.run_jobs(answer_to)
    await operator.settle()
    assert commands(operator) == []
    assert len(records(operator)) == 1


# The API


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"model": LOCAL, "quantization": CALIBRATED}, "needs model.cache"),
        ({"model": LOCAL | CACHE, "quantization": {"calibration": dataset("c")}}, "needs method RTN"),
        ({"model": LOCAL | CACHE, "quantization": {"method": "None", "calibration": dataset("c")}}, "needs method RTN"),
        ({"model": LOCAL | CACHE, "quantization": {"method": "RTN", "calibration": {}}}, "exactly one source"),
        ({"model": LOCAL | CACHE}, "model.cache keeps what is downloaded or quantized"),
        ({"quantization": {"qualityGate": {"dataset": dataset("h")}}}, "one of calibration and qualityGate.base"),
    ],
)
def test_what_does_not_belong_together_is_refused_with_the_fix(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        deployment(**spec)


def test_a_gate_is_no_input_of_a_plan_and_calibration_is() -> None:
    plain, gated = deployment(model=LOCAL | CACHE, quantization=CALIBRATED), deployment(**MADE)
    assert input_hash(plain) == input_hash(gated)
    other = deployment(model=LOCAL | CACHE, quantization={"method": "AWQ", "calibration": dataset("other")})
    assert input_hash(plain) != input_hash(other)
    judged = deployment(quantization={"qualityGate": MADE["quantization"]["qualityGate"] | {"base": LOCAL["source"]}})
    assert input_hash(judged) == input_hash(deployment())
    assert input_hash(deployment(quantization={})) != input_hash(deployment()), "as it was before there were gates"
