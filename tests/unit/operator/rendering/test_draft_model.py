"""The draft model is inspected, pinned and fetched as the target is; where the runtime has no drafts it is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from millstream_operator.api.load import ManifestError
from millstream_operator.catalog.inspected_model import read_answer, read_inspected
from millstream_operator.diagnosis.volumes import shared_source_claims, source_problem
from millstream_operator.facts.inspection import subjects
from millstream_operator.kube.kinds import CONFIG_MAP, CONTROLLER_REVISION, DEPLOYMENT, JOB, NETWORK_POLICY
from millstream_operator.planning.facts import EVERYTHING, Facts
from millstream_operator.planning.inspected import Inspected
from millstream_operator.planning.plan import Plan, PlanDefaults
from millstream_operator.planning.restart_fields import input_hash
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_operator.rendering.network_policy import NetworkDefaults, network_policy
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.pod_template import pod_template
from millstream_operator.rendering.revision import controller_revision, read_revision, render_revision
from millstream_operator.rendering.runtime_config import boot_config
from millstream_runtime.config import CAPABILITIES, Capabilities
from tests.support.fake_operator import FakeOperator, answer_of, respec, served, world
from tests.support.llmdeployments import deployment, manifest

DEFAULTS = PlanDefaults("runtime:1")
TARGET, DRAFT = "a" * 40, "b" * 40
HUB = {"huggingFace": {"repository": "org/target", "tokenSecretRef": {"name": "one", "key": "token"}}}
DRAFT_HUB = {"huggingFace": {"repository": "org/draft", "tokenSecretRef": {"name": "two", "key": "token"}}}
CLAIM = {"persistentVolumeClaim": {"claimName": "drafts", "path": "small"}}
LOCAL = {"local": {"path": "demo-chat"}}
CACHE = {"size": "20Gi"}
BOTH = {"model", "draft"}
LACKING = "Medusa"  # a method with a draft model that the runtime has nowhere
NO_DRAFTS = replace(CAPABILITIES, cpu_speculation_methods=frozenset({"Disabled", "NGram"}))


def spec(model: dict[str, Any], draft: dict[str, Any] | None, cache: dict[str, Any] | None = None) -> dict[str, Any]:
    speculation = {"speculation": {"draftModel": {"source": draft}}} if draft is not None else {}
    return {"model": {"source": model} | ({"cache": cache} if cache else {})} | speculation


def inspected() -> Inspected:
    target, draft = (read_inspected(read_answer(answer_of(revision))) for revision in (TARGET, DRAFT))
    return Inspected(model=target, draft=draft)


def planned(**fields: Any) -> Plan:
    return plan_from_spec(deployment(**fields), DEFAULTS, inspected().over(Facts(runtime=EVERYTHING)))


def pod(**fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = pod_template(deployment(**fields), planned(**fields), PodDefaults())["spec"]
    return found


@pytest.mark.parametrize(
    ("model", "draft", "names"),
    [(HUB, DRAFT_HUB, BOTH), (HUB, LOCAL, BOTH), (LOCAL, DRAFT_HUB, BOTH), (LOCAL, CLAIM, BOTH), (LOCAL, LOCAL, BOTH),
     (HUB, None, {"model"}), (LOCAL, None, set())],
)  # fmt: skip
def test_both_sources_are_inspected_where_the_runtime_has_draft_models(
    model: dict[str, Any], draft: dict[str, Any] | None, names: set[str]
) -> None:
    assert set(subjects(deployment(**spec(model, draft)), DEFAULTS)) == names
    if draft is not None:
        fields = spec(model, draft) | {"speculation": {"method": LACKING, "draftModel": {"source": draft}}}
        refused = deployment(**fields, accelerator={"type": "GPU"})
        assert subjects(refused, DEFAULTS) == {}, "the runtime refuses it there, whatever the models are"


def test_the_commit_of_the_draft_is_pinned_and_fetched_with_its_own_token() -> None:
    containers = {one["name"]: one for one in pod(**spec(HUB, DRAFT_HUB))["initContainers"]}
    assert list(containers) == ["fetch-model", "draft-fetch-model"]
    args = containers["draft-fetch-model"]["args"]
    assert {"--hugging-face=org/draft", f"--revision={DRAFT}", "--into=/models/draft/huggingFace"} <= set(args)
    assert f"--revision={TARGET}" in containers["fetch-model"]["args"]
    volumes = {one["name"]: one for one in pod(**spec(HUB, DRAFT_HUB))["volumes"]}
    assert volumes["hub-token"]["secret"]["secretName"] == "one"
    assert volumes["draft-hub-token"]["secret"]["secretName"] == "two"
    mounted = {mount["name"] for mount in containers["draft-fetch-model"]["volumeMounts"]}
    assert mounted == {"draft-model", "draft-hub-token", "tmp"}, "no container has the other's token"
    runtime = pod(**spec(HUB, DRAFT_HUB))["containers"][0]
    paths = {mount["name"]: (mount["mountPath"], mount.get("readOnly")) for mount in runtime["volumeMounts"]}
    assert paths["model"] == ("/models/huggingFace", True)
    assert paths["draft-model"] == ("/models/draft/huggingFace", True)
    assert not any("token" in name for name in paths)


def test_a_draft_in_a_claim_is_mounted_and_one_in_a_cache_has_its_own_folder() -> None:
    spec_of_pod = pod(**spec(LOCAL, CLAIM))
    assert "initContainers" not in spec_of_pod
    mounts = {mount["name"]: mount for mount in spec_of_pod["containers"][0]["volumeMounts"]}
    assert mounts["draft-model"]["mountPath"] == "/models/draft/persistentVolumeClaim"
    draft = planned(**spec(LOCAL, CLAIM)).draft
    assert draft is not None
    assert draft.path == "draft/persistentVolumeClaim/small"
    cached = pod(**spec(HUB, DRAFT_HUB, CACHE))
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in cached["volumes"] if "model" in volume["name"]]
    assert claims == [claims[0]] * 2, "one cache for both"
    into = [one["args"][-1] for one in cached["initContainers"]]
    assert into == [
        f"--into=/models/huggingFace/org--target-{TARGET[:12]}",
        f"--into=/models/draft/huggingFace/org--draft-{DRAFT[:12]}",
    ]


def test_the_rule_of_acceptance_reaches_the_runtime_only_where_it_is_asked_for() -> None:
    """By default boot.json does not name it, and no stored plan does."""
    asked = spec(LOCAL, CLAIM)
    for acceptance, rule in ((None, None), ("Identity", None), ("Distribution", "Distribution")):
        speculation = asked["speculation"] | ({"acceptance": acceptance} if acceptance else {})
        plan = planned(**asked | {"speculation": speculation})
        assert boot_config(plan).as_dict().get("speculation_acceptance") == rule
        assert plan.speculation.as_dict().get("acceptance") == rule


def test_a_cache_may_be_for_the_draft_alone() -> None:
    fields = spec(LOCAL, DRAFT_HUB, CACHE)
    (fetch,) = pod(**fields)["initContainers"]
    assert fetch["name"] == "draft-fetch-model"
    assert fetch["args"][-1] == f"--into=/models/draft/huggingFace/org--draft-{DRAFT[:12]}"
    with pytest.raises(ManifestError, match="of the model or of its draft"):
        deployment(**spec(LOCAL, LOCAL, CACHE))


def test_a_model_that_the_cluster_quantizes_keeps_its_draft() -> None:
    made = {"quantization": {"method": "AWQ", "calibration": {"configMapRef": {"name": "data", "key": "c.jsonl"}}}}
    found = pod(**spec(HUB, DRAFT_HUB, CACHE), **made)
    mounts = {mount["name"]: mount["mountPath"] for mount in found["containers"][0]["volumeMounts"]}
    assert mounts["quantized"] == "/models/quantized"
    assert mounts["draft-model"] == "/models/draft/huggingFace"
    assert [one["name"] for one in found["initContainers"]] == ["draft-fetch-model"]


def test_a_pod_gets_no_files_of_a_draft_that_the_runtime_cannot_use() -> None:
    for method, expected in (("DraftModel", True), (LACKING, False)):
        speculation = {"method": method, "draftModel": {"source": DRAFT_HUB}}
        owner = deployment(model={"source": LOCAL}, speculation=speculation, accelerator={"type": "GPU"})
        plan = plan_from_spec(owner, DEFAULTS, inspected().over(Facts()))
        assert (plan.draft is not None) is expected
        assert (f"speculation={method}" in plan.requires) is not expected
        policy = network_policy(owner, NetworkDefaults())
        assert policy is not None
        assert (len(policy["spec"]["egress"]) > 1) is expected
        assert bool(subjects(owner, DEFAULTS)) is expected


async def test_a_draft_that_cannot_be_inspected_is_named() -> None:
    operator = FakeOperator(world(manifest(**spec(HUB, DRAFT_HUB))))
    await operator.turn()
    assert "Reading the model's shape: org/target at main." in operator.condition("Ready")["message"]
    operator.cluster.run_jobs(answer_of(TARGET))
    await operator.turn()
    assert "Reading the draft model's shape: org/draft at main." in operator.condition("Ready")["message"]
    refused = {"reason": "DownloadUnauthorized", "message": "The hub answered HTTP 401."}
    operator.cluster.run_jobs(json.dumps(refused), 1)
    await operator.turn()
    ready = operator.condition("Ready")
    assert ready["reason"] == "DownloadUnauthorized"
    named = "The draft model org/draft at main (speculation.draftModel.source) cannot be inspected: "
    assert ready["message"] == f"{named}The hub answered HTTP 401."


def test_a_claim_of_the_draft_that_one_node_mounts_is_refused_with_replicas() -> None:
    owner = deployment(**spec(LOCAL, CLAIM), replicas=2)
    assert shared_source_claims(owner) == {"speculation.draftModel.source": "drafts"}
    found = source_problem(owner, "speculation.draftModel.source", "drafts", frozenset({"ReadWriteOnce"}))
    assert found is not None
    assert "the claim drafts of speculation.draftModel.source is ReadWriteOnce" in found.message


def test_names_in_a_pod_are_unique() -> None:
    secrets = {"podTemplate": {"spec": {"imagePullSecrets": [{"name": "login"}]}}}
    image, other = ({"image": {"reference": f"registry.example.com/{name}:1"}} for name in ("target", "draft"))
    found = pod(**spec(image, other), **secrets)
    for names in (found["volumes"], found["initContainers"], found["containers"][0]["volumeMounts"]):
        assert len({one["name"] for one in names}) == len(names)


def test_the_revision_stores_the_commit_of_the_draft_and_nothing_where_there_is_none() -> None:
    fields = spec(HUB, DRAFT_HUB)
    owner = deployment(**fields)
    revision = render_revision(owner, planned(**fields), PodDefaults())
    assert (revision.resolved_revision, revision.resolved_draft_revision) == (TARGET, DRAFT)
    assert read_revision(controller_revision(owner, revision, 1)) == revision
    alone = spec(HUB, None)
    assert "resolvedDraftRevision" not in render_revision(deployment(**alone), planned(**alone), PodDefaults()).data()


@pytest.mark.parametrize(
    ("model", "draft", "open_"), [(LOCAL, DRAFT_HUB, True), (LOCAL, LOCAL, False), (HUB, LOCAL, True)]
)
def test_egress_follows_what_is_downloaded(model: dict[str, Any], draft: dict[str, Any], open_: bool) -> None:
    owner = deployment(**spec(model, draft))

    def is_open(runtime: Capabilities) -> bool:
        policy = network_policy(owner, NetworkDefaults(), runtime=runtime)
        assert policy is not None
        return len(policy["spec"]["egress"]) > 1  # besides DNS

    assert is_open(CAPABILITIES) is open_
    assert is_open(NO_DRAFTS) is (model is HUB), "a refused draft opens nothing"


async def test_a_pair_from_two_sources_is_served_and_a_restarted_operator_writes_nothing() -> None:
    operator = FakeOperator(world(manifest(**spec(HUB, DRAFT_HUB))))
    await operator.turn()
    operator.cluster.run_jobs(answer_of(TARGET))
    await operator.turn()
    operator.cluster.run_jobs(answer_of(DRAFT))
    await operator.settle()
    assert operator.condition("Ready")["reason"] == "Ready"
    cluster = operator.cluster
    assert operator.status()["model"] == {
        "servedName": "demo",
        "resolvedRevision": TARGET,
        "resolvedDraftRevision": DRAFT,
    }
    files = [one["data"]["boot.json"] for one in cluster.all(CONFIG_MAP) if "boot.json" in one.get("data", {})]
    boot = json.loads(files[0])
    assert (boot["model"], boot["draft_model"]) == ("/models/huggingFace", "/models/draft/huggingFace")
    assert boot["speculation_method"] == "DraftModel"
    assert cluster.all(JOB) == []
    restarted = FakeOperator(cluster)
    await restarted.settle()
    assert restarted.writes == []
    respec(cluster, speculation=None)
    await operator.settle()
    pod = cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]
    assert [one["name"] for one in pod["initContainers"]] == ["fetch-model"]
    assert not [one for one in pod["volumes"] if one["name"].startswith("draft-")]
    assert "resolvedDraftRevision" not in operator.status()["model"]


async def test_nothing_of_a_draft_reaches_the_cluster_while_it_is_refused() -> None:
    operator = await served(manifest(accelerator={"type": "GPU"}))
    cluster = operator.cluster
    before = {kind: cluster.all(kind) for kind in (DEPLOYMENT, CONTROLLER_REVISION, NETWORK_POLICY, JOB)}
    respec(cluster, speculation={"method": LACKING, "draftModel": {"source": DRAFT_HUB}})
    await operator.settle()
    assert operator.condition("Ready")["reason"] == "UnsupportedByRuntime"
    assert f"speculation={LACKING}" in operator.condition("Ready")["message"]
    assert {kind: cluster.all(kind) for kind in before} == before
    restarted = FakeOperator(cluster)
    await restarted.settle()
    assert restarted.writes == []


def test_the_input_hash_of_a_spec_with_a_draft_is_what_it_was() -> None:
    assert input_hash(deployment(**spec(HUB, DRAFT_HUB))) == "ef82c97bafa8eeb3"
