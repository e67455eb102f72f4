"""A draft is tuned in a Job while it serves, and pods load the tuned one only if more of its drafts stand."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from millstream_operator.api.load import ManifestError
from millstream_operator.kube.kinds import CONFIG_MAP, CONTROLLER_REVISION, DEPLOYMENT, JOB
from millstream_operator.planning.restart_fields import input_hash
from tests.support.fake_cluster import FakeCluster, Fault, Killed
from tests.support.fake_operator import COMMIT, FakeOperator, answer_of, answer_to, respec, served, tuned, world
from tests.support.llmdeployments import deployment, manifest
from tests.support.prepared_models import (
    CACHE,
    CALIBRATED,
    LOCAL,
    Manifest,
    arguments,
    commands,
    dataset,
    journal,
    records,
)
from tests.support.rollout_world import World

pytestmark = pytest.mark.deep

DRAFT: Manifest = {"draftModel": {"source": {"local": {"path": "demo-draft"}}}}
TUNING: Manifest = {"dataset": dataset("traffic")}
TUNED: Manifest = {"model": LOCAL | CACHE, "speculation": DRAFT | {"tuning": TUNING}}
HUB: Manifest = {"source": {"huggingFace": {"repository": "org/name"}}}
REASON = "acceptance on the data gained 0.20 points, and the interval of 95 % begins at -0.40"


def untuned(job: Manifest) -> str:
    """What every Job says but the one that tunes, which says that the draft is not better."""
    return tuned("not better", [REASON]) if arguments(job)[0] == "tune-draft" else answer_to(job)


def answer(job: Manifest) -> str:
    """What a Job says where the draft is smaller than the target."""
    is_small = "inspect" in arguments(job) and arguments(job)[1].endswith("demo-draft")
    return answer_of(None, num_hidden_layers=1, hidden_size=32, intermediate_size=64) if is_small else answer_to(job)


async def tuning(**spec: Any) -> FakeOperator:
    """An operator whose model serves with the draft as it is, and whose Job tunes the draft."""
    operator = FakeOperator(world(manifest(**(spec or TUNED))))
    await until_tuning(operator)
    return operator


async def until_tuning(operator: FakeOperator, turns: int = 20) -> None:
    for _ in range(turns):
        await operator.turn()
        if "tune-draft" in commands(operator):
            await operator.turn()
            return
        operator.cluster.run_jobs(answer)
        operator.cluster.roll_out()
        operator.cluster.collect_garbage()
    raise AssertionError(f"no Job tunes: {commands(operator)}, {operator.condition('Ready')}")


async def ended(operator: FakeOperator, answer: str, code: int = 0) -> None:
    """The Job ends, and all that follows."""
    operator.cluster.run_jobs(answer, code)
    operator.cluster.collect_garbage()
    await operator.settle(inspected="no other Job is started")


def the_job(operator: FakeOperator) -> Manifest:
    (job,) = operator.cluster.all(JOB)
    return job


def served_draft(operator: FakeOperator) -> str:
    """The folder of the draft in the configuration of the pods."""
    (volume,) = [one for one in pod_spec(operator)["volumes"] if one["name"] == "config"]
    name = volume["projected"]["sources"][0]["configMap"]["name"]
    found: str = json.loads(operator.cluster.the(CONFIG_MAP, name)["data"]["boot.json"])["draft_model"]
    return found


def pod_spec(operator: FakeOperator) -> Manifest:
    found: Manifest = operator.cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]
    return found


# The Job


async def test_the_job_tunes_the_models_that_serve_into_the_cache_under_the_restricted_profile() -> None:
    numbers = {"steps": 40, "sequenceTokens": 128, "maxAnswerTokens": 48}
    general = {"generalDataset": {"persistentVolumeClaim": {"claimName": "domain", "path": "general.jsonl"}}}
    operator = await tuning(model=LOCAL | CACHE, speculation=DRAFT | {"tuning": TUNING | numbers | general})
    spec = the_job(operator)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    out = next(word for word in container["args"] if word.startswith("--out=")).removeprefix("--out=")
    assert container["args"] == [
        "tune-draft",
        "/models/demo-chat",
        "/models/demo-draft",
        "--data=/var/run/millstream/dataset/traffic/data.jsonl",
        f"--out={out}",
        "--keep-made",
        "--discard-other-work",
        "--only-better",
        "--device=cpu",
        "--general=/var/run/millstream/general-dataset/domain/general.jsonl",
        "--steps=40",
        "--sequence-tokens=128",
        "--max-answer-tokens=48",
    ]
    assert out.startswith("/models/tuned/draft-")
    mounts = {one["name"]: (one["mountPath"], one.get("readOnly")) for one in container["volumeMounts"]}
    assert mounts["tuned"] == ("/models/tuned", None)
    assert mounts["general-dataset"] == ("/var/run/millstream/general-dataset/domain", True)
    volume = next(one for one in spec["volumes"] if one["name"] == "tuned")
    assert volume["persistentVolumeClaim"] == {"claimName": "demo-model-cache"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert (spec["securityContext"]["runAsNonRoot"], spec["automountServiceAccountToken"]) == (True, False)


async def test_models_of_a_hub_are_downloaded_for_the_job_as_for_the_pods_that_serve() -> None:
    draft = {"draftModel": {"source": {"huggingFace": {"repository": "org/draft"}}}}
    operator = await tuning(model=HUB | CACHE, speculation=draft | {"tuning": TUNING})
    spec, serving = the_job(operator)["spec"]["template"]["spec"], pod_spec(operator)
    assert [one["args"] for one in spec["initContainers"]] == [one["args"] for one in serving["initContainers"]]
    assert spec["containers"][0]["args"][1:3] == [
        f"/models/huggingFace/org--name-{COMMIT[:12]}",
        f"/models/draft/huggingFace/org--draft-{COMMIT[:12]}",
    ]
    await ended(operator, tuned())
    loaded = pod_spec(operator)
    assert [one["name"] for one in loaded["initContainers"]] == ["fetch-model"], "the tuned draft is there"


async def test_the_draft_of_a_model_that_the_cluster_quantizes_is_tuned_for_what_serves() -> None:
    operator = await tuning(**TUNED, quantization=CALIBRATED)
    words = arguments(the_job(operator))
    assert words[1].startswith("/models/quantized/awq-")
    assert words[2] == "/models/demo-draft"
    await ended(operator, tuned())
    mounts = {one["name"] for one in pod_spec(operator)["containers"][0]["volumeMounts"]}
    assert {"quantized", "tuned"} <= mounts


async def test_the_memory_of_the_job_follows_from_the_models_and_pod_template_replaces_it() -> None:
    (container,) = the_job(await tuning())["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["memory"] == "2560Mi"
    assert container["resources"]["limits"]["memory"] == "4864Mi"
    given = {"containers": [{"name": "runtime", "resources": {"limits": {"memory": "3Gi"}}}]}
    operator = await tuning(**TUNED, podTemplate={"spec": given})
    (container,) = the_job(operator)["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == "3Gi"


# The draft as it is serves first


async def test_the_draft_as_it_is_serves_while_the_job_runs_and_the_status_says_which_job() -> None:
    operator = await tuning()
    assert served_draft(operator) == "/models/demo-draft"
    assert operator.condition("Ready")["status"] == "True"
    found = operator.condition("DraftTuned")
    assert (found["status"], found["reason"]) == ("False", "TuningDraft")
    assert the_job(operator)["metadata"]["name"] in found["message"]
    assert "attempt 1" in found["message"]
    assert journal(operator) == ["DraftTuningStarted"]


async def test_no_job_begins_before_the_model_has_answered() -> None:
    operator = FakeOperator(world(manifest(**TUNED)))
    operator.model.unreachable = "connection refused"
    for _ in range(8):
        await operator.turn()
        operator.cluster.run_jobs(answer_to)
        operator.cluster.roll_out()
        operator.cluster.collect_garbage()
    assert commands(operator) == []
    assert operator.condition("DraftTuned")["message"] == "It begins once the model has answered."


async def test_the_job_begins_at_once_when_the_model_has_answered() -> None:
    """No watch event follows from the mark of a record, which is the operator's own write."""
    operator = FakeOperator(world(manifest(**TUNED)))
    for _ in range(8):
        await operator.turn()
        if operator.condition("ModelReady").get("status") == "True":
            break
        operator.cluster.run_jobs(answer_to)
        operator.cluster.roll_out()
    assert operator.condition("DraftTuned")["message"] == "It begins once the model has answered."
    assert operator.retries[-1].at_least_seconds == 1.0
    turns = len(operator.retries)
    await operator.turn()
    assert commands(operator) == ["tune-draft"]
    await operator.turn()
    assert len(operator.retries) == turns, "it waits for the Job"


async def test_while_it_runs_nothing_is_written() -> None:
    operator = await tuning()
    operator.client.requests.clear()
    await operator.turn()
    await operator.turn()
    assert operator.writes == []


async def test_tuning_added_to_a_draft_that_serves_restarts_nothing() -> None:
    operator = await served(manifest(model=HUB | CACHE, speculation=DRAFT))
    before = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    respec(operator.cluster, speculation=DRAFT | {"tuning": TUNING})
    await until_tuning(operator)
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] == before
    respec(operator.cluster, speculation=DRAFT)
    await operator.settle(inspected="no Job is started")
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] == before
    assert (operator.cluster.all(JOB), operator.condition("DraftTuned")) == ([], {})


# Promoted


async def test_a_better_draft_replaces_the_draft_by_a_rollout_and_the_journal_has_the_figures() -> None:
    operator = await tuning()
    out = next(word for word in arguments(the_job(operator)) if word.startswith("--out=")).removeprefix("--out=")
    before = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    await ended(operator, tuned())
    assert served_draft(operator) == out
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] != before
    mount = next(one for one in pod_spec(operator)["containers"][0]["volumeMounts"] if one["name"] == "tuned")
    assert (mount["mountPath"], mount["readOnly"]) == ("/models/tuned", True)
    assert operator.condition("Ready")["status"] == "True"
    found = operator.condition("DraftTuned")
    assert (found["status"], found["reason"]) == ("True", "DraftTuned")
    assert "code: 12.9 % of the drafts stood, 74.3 % stand" in found["message"]
    assert journal(operator) == ["DraftTuningStarted", "TunedDraftPromoted"], "and no adoption besides"
    reasons = {one["field"]: one["reason"] for one in operator.status()["plan"]["reasons"]}
    assert "speculation.tuning.dataset" in reasons["speculation.draftModel"]
    assert (operator.cluster.all(JOB), len(records(operator))) == ([], 1)


async def test_once_promoted_nothing_is_written_and_a_new_operator_finds_it_so() -> None:
    operator = await served(manifest(**TUNED))
    await operator.turn()
    assert operator.writes == []
    later = FakeOperator(operator.cluster, image="registry.example.com/runtime:2")
    await later.turn()
    assert later.writes == [], "an upgrade restarts nothing"


@pytest.mark.parametrize("change", [{"engine": {"maxNumSeqs": 8}}, {"replicas": 2}], ids=["engine", "replicas"])
async def test_a_draft_is_tuned_once_whatever_else_changes(change: Manifest) -> None:
    operator = await served(manifest(**TUNED))
    out = served_draft(operator)
    respec(operator.cluster, **change)
    await operator.settle(inspected="no Job is started")
    assert operator.condition("Ready")["status"] == "True"
    assert ("apply", "Job") not in operator.writes
    assert served_draft(operator) == out


async def test_another_dataset_tunes_anew_while_the_tuned_draft_serves_and_back_is_back_without_a_job() -> None:
    operator = await served(manifest(**TUNED))
    first, template = served_draft(operator), operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    respec(operator.cluster, speculation=DRAFT | {"tuning": {"dataset": dataset("traffic-2")}})
    await until_tuning(operator)
    assert served_draft(operator) == first, "until the new one is better"
    await ended(operator, tuned())
    assert served_draft(operator) != first
    respec(operator.cluster, speculation=DRAFT | {"tuning": TUNING})
    await operator.settle(inspected="no Job is started")
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] == template


async def test_a_spec_without_tuning_goes_back_to_the_draft_as_it_is() -> None:
    operator = await served(manifest(**TUNED))
    respec(operator.cluster, speculation=DRAFT | {"tuning": None}, model=LOCAL)
    await operator.settle(inspected="no Job is started")
    assert served_draft(operator) == "/models/demo-draft"
    assert operator.condition("DraftTuned") == {}
    assert operator.condition("Ready")["status"] == "True"


async def test_a_tuned_draft_whose_pods_fail_is_rolled_back_to_the_draft_that_served() -> None:
    one = World(world(manifest(**TUNED)))
    one.controller.failing["tuned"] = one.controller.failing["bad"]
    await one.settle()
    found = {record["data"].get("tunedDraft") for record in one.cluster.all(CONTROLLER_REVISION)}
    assert len(found) == 2, "the draft as it is, and the tuned one"
    assert served_draft(one.operator) == "/models/demo-draft"
    assert one.operator.condition("Available")["status"] == "True"
    assert one.operator.condition("Ready")["reason"] == "RolledBack"
    assert "TunedDraftPromoted" in one.decisions
    assert "PlanAdopted" not in one.decisions


# Not better, or not tuned


async def test_a_draft_that_is_not_better_never_serves_and_nothing_is_tried_again() -> None:
    operator = await tuning()
    before = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    await ended(operator, tuned("not better", [REASON]), 3)
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] == before
    assert operator.condition("Ready")["status"] == "True"
    found = operator.condition("DraftTuned")
    assert (found["status"], found["reason"]) == ("False", "DraftNotBetter")
    assert REASON in found["message"]
    assert "Change speculation.tuning" in found["message"]
    assert journal(operator) == ["DraftTuningStarted", "TunedDraftRefused"]
    operator.client.requests.clear()
    operator.now = "2025-01-02T00:00:00Z"
    await operator.turn()
    assert operator.writes == []
    respec(operator.cluster, speculation=DRAFT | {"tuning": TUNING | {"steps": 400}})
    await until_tuning(operator)
    assert operator.condition("DraftTuned")["reason"] == "TuningDraft"
    await ended(operator, tuned())
    assert served_draft(operator).startswith("/models/tuned/draft-")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("InvalidConfig", "Line 7 of /var/run/millstream/dataset/traffic/data.jsonl is no document: no JSON."),
        ("InvalidConfig", "Cannot read --data /var/run/millstream/dataset/traffic/data.jsonl: No such file."),
        (
            "DiskFull",
            "No space is left to write /models/tuned/x; free some and run it again.",
        ),
    ],
    ids=["line", "missing", "disk"],
)
async def test_a_job_that_fails_is_one_reason_and_tried_again_while_the_draft_serves(reason: str, words: str) -> None:
    operator = await tuning()
    out = [word for word in arguments(the_job(operator)) if word.startswith("--out=")]
    operator.cluster.run_jobs(json.dumps({"reason": reason, "message": words}), 2)
    await operator.turn()
    found = operator.condition("DraftTuned")
    assert (found["status"], found["reason"]) == ("False", reason)
    assert found["message"].startswith("Tuning the draft failed: ")
    assert "goes on serving" in found["message"]
    if reason == "InvalidConfig":
        assert "key data.jsonl of ConfigMap traffic (speculation.tuning.dataset)" in found["message"]
    assert operator.condition("Ready")["status"] == "True"
    assert operator.retries[-1].at_least_seconds > 0, "it comes back by itself"
    operator.now = "2025-01-01T00:05:00Z"
    await operator.turn()
    assert [[word for word in arguments(job) if word.startswith("--out=")] for job in operator.cluster.all(JOB)] == [
        out,
        out,
    ], "it goes on from its last checkpoint"
    await operator.settle()
    assert served_draft(operator).startswith("/models/tuned/")


async def test_a_job_that_was_killed_for_memory_says_what_to_raise() -> None:
    operator = await tuning()
    operator.cluster.run_jobs("", 137, reason="OOMKilled")
    await operator.turn()
    found = operator.condition("DraftTuned")
    assert found["reason"] == "OutOfMemory"
    assert found["message"].startswith("Tuning the draft was stopped: the kernel killed it")
    assert "podTemplate.spec.containers[runtime].resources.limits.memory" in found["message"]


async def test_an_answer_that_no_operator_reads_changes_nothing() -> None:
    operator = await tuning()
    operator.cluster.run_jobs('{"version": 1, "event": "tuned", "verdict": "passed", "slices": []}')
    await operator.turn()
    assert operator.condition("DraftTuned")["reason"] == "InvalidConfig"
    assert "`millstream tune-draft`" in operator.condition("DraftTuned")["message"]
    assert served_draft(operator) == "/models/demo-draft"


async def test_a_spec_that_is_refused_keeps_what_was_said_of_the_draft() -> None:
    operator = await served(manifest(**TUNED))
    before = operator.condition("DraftTuned")
    respec(operator.cluster, parallelism={"pipeline": 2}, accelerator={"type": "GPU"})
    await operator.settle(inspected="no Job is started")
    assert operator.condition("Ready")["status"] == "False"
    assert operator.condition("DraftTuned") == before


# An operator that dies


ENDS: dict[str, tuple[FakeCluster, dict[Any, Manifest], int]] = {}


async def whole_story(operator: FakeOperator) -> None:
    await operator.settle(inspected=None)


async def undisturbed(better: bool) -> tuple[FakeCluster, dict[Any, Manifest], int]:
    """The world in which the Job tunes, its end without a fault, and how many writes that took."""
    name = str(better)
    if name not in ENDS:
        begun = (await tuning()).cluster
        begun.run_jobs(answer_to if better else untuned)
        quiet = FakeOperator(copy.deepcopy(begun))
        await whole_story(quiet)
        ENDS[name] = begun, comparable(quiet), len(quiet.client.written)
    begun, wanted, writes = ENDS[name]
    return copy.deepcopy(begun), wanted, writes


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("better", [True, False], ids=["better", "not better"])
async def test_killed_at_any_write_a_new_process_ends_where_no_fault_would(better: bool, after: bool) -> None:
    _, wanted, writes = await undisturbed(better)
    assert writes >= 3
    for at in range(writes):
        cluster, _, _ = await undisturbed(better)
        with pytest.raises(Killed):
            await whole_story(FakeOperator(cluster, fault=Fault(at, Killed(), after=after)))
        second = FakeOperator(cluster)
        await whole_story(second)
        assert comparable(second) == wanted, f"killed at write {at}"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_killed_at_any_write_before_the_job_there_is_one_job(after: bool) -> None:
    for at in range(100):
        operator = FakeOperator(world(manifest(**TUNED)), fault=Fault(at, Killed(), after=after))
        try:
            await until_tuning(operator)
        except Killed:
            second = FakeOperator(operator.cluster)
            await until_tuning(second)
            assert commands(second) == ["tune-draft"]
            assert journal(second) == ["DraftTuningStarted"]
            continue
        return
    raise AssertionError("never ends")


def comparable(operator: FakeOperator) -> dict[Any, Manifest]:
    """Without the pods, whose names count how many there were before."""
    return {key: live for key, live in operator.cluster.snapshot().items() if key[0] not in ("Pod", "Event")}


# The API


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"model": LOCAL, "speculation": DRAFT | {"tuning": TUNING}}, "needs model.cache"),
        ({"model": LOCAL | CACHE, "speculation": {"tuning": TUNING}}, "name one as draftModel"),
        ({"model": LOCAL | CACHE, "speculation": {"method": "NGram", "tuning": TUNING}}, "name one as draftModel"),
        ({"model": LOCAL | CACHE, "speculation": DRAFT | {"tuning": {"dataset": {}}}}, "exactly one source"),
        ({"model": LOCAL | CACHE, "speculation": DRAFT | {"tuning": {}}}, "dataset"),
    ],
)
def test_what_does_not_belong_together_is_refused_with_the_fix(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        deployment(**spec)


def test_tuning_is_no_input_of_a_plan() -> None:
    plain = deployment(model=HUB | CACHE, speculation=DRAFT)
    assert input_hash(plain) == input_hash(deployment(model=HUB | CACHE, speculation=DRAFT | {"tuning": TUNING}))
