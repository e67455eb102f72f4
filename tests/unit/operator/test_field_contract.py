"""Every field works or is rejected: each one is changed alone, and something that is applied must change with it.

The spec's types are walked, so a field that is added to them without an entry in `CHANGES` fails here. What counts
is what is applied to the cluster (the Deployment, the Service, …), not the revision, which has a hash of the whole
spec and would change with a field that is not read.
"""

from __future__ import annotations

import copy
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from enum import Enum
from typing import Any

import pytest
from pydantic import BaseModel

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import ManifestError, parse
from millstream_operator.api.spec import LLMDeploymentSpec
from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.catalog.gpu_names import parse_island
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.diagnosis.plan_refused import PlanRefused
from millstream_operator.facts.inspection import subjects
from millstream_operator.inventory.node_kinds import inventory_of
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.restart_fields import input_hash
from millstream_operator.rendering.companions import (
    POD_MONITOR,
    PROMETHEUS_RULE,
    SCALED_OBJECT,
    Autoscaler,
    CompanionDefaults,
    autoscaler,
    monitors,
)
from millstream_operator.rendering.inspect_job import inspect_job
from millstream_operator.rendering.objects import objects
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import controller_revision
from millstream_operator.rollout.pinning import Pinning
from tests.support.fake_operator import CONFIG as CONFIG_JSON
from tests.support.llmdeployments import full_manifest, manifest
from tests.support.pinned_plans import NoFacts, choose, chosen_pin

Manifest = dict[str, Any]
Objects = dict[str, Manifest]
DEPLOYMENT, SERVICE, BUDGET, POLICY = "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"
JOB, CLAIM_OBJECT = "Job", "PersistentVolumeClaim"
EVERY_POD = (DEPLOYMENT, JOB)  # those that serve, and the one that inspects the model before
LIVE = "ConfigMap"  # watched by the runtime: a change of it restarts nothing
SCALER, MONITORS = "HorizontalPodAutoscaler", ("PodMonitor", "PrometheusRule")


@dataclass(frozen=True)
class Changes:
    """Another valid value, and the kinds of object that it changes.

    `without`: fields that would forbid the value. `instead`: fields of the spec that have to be others for it.
    """

    to: Any
    kinds: tuple[str, ...] = (DEPLOYMENT,)
    without: tuple[str, ...] = ()
    instead: dict[str, Any] = dataclass_field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """No value works in this version: this one is refused, with these words."""

    value: Any
    words: str


@dataclass(frozen=True)
class NotYet:
    """The runtime or the operator lacks what it asks for: it is planned, and refused by that name when applied.

    `spec` replaces whole fields of the full manifest's spec.
    """

    spec: dict[str, Any]
    requirement: str


@dataclass(frozen=True)
class Planned:
    """It decides by the cluster's GPUs and the model's shape: another value, and that it changes the Deployment.

    `spec`: fields of a spec that already says something there. `refused`: the reason why the other value is refused
    instead. Where GPUs or shape are not known any value is refused by name.
    """

    spec: dict[str, Any]
    to: Any
    refused: str | None = None


@dataclass(frozen=True)
class Adopts:
    """It changes nothing by itself: with this value what an older operator pinned is rendered anew."""

    to: Any


def hub(**fields: Any) -> dict[str, Any]:
    return {"model": {"source": {"huggingFace": {"repository": "org/name", **fields}}}}


def draft(**source: Any) -> dict[str, Any]:
    return {"speculation": {"draftModel": {"source": source or {"local": {"path": "draft"}}}}}


TOKEN = {"tokenSecretRef": {"name": "hub", "key": "token"}}
CLAIM = {"persistentVolumeClaim": {"claimName": "models", "path": "chat"}}
IMAGE = {"image": {"reference": "registry.example.com/model:1", "pullPolicy": "Always"}}
CONFIG = {
    "model": {"source": {"local": {"path": "demo-chat"}}, "configMapRef": {"name": "shape", "key": "config.json"}}
}
FROM_IMAGE = {"model": {"source": IMAGE}}
CACHED = {
    "model": {
        "source": {"huggingFace": {"repository": "org/name"}},
        "cache": {"size": "1Ti", "storageClassName": "fast", "accessMode": "ReadWriteOnce"},
    },
    "replicas": 1,
}
BATCHING = ("engine.maxNumBatchedTokens", "engine.maxNumSeqs", "engine.gpuMemoryUtilizationPercent")
DRAFT, DRAFTS = "speculation.draftModel", "speculation=DraftModel"
POD = "podTemplate.spec"
ENV = f"{POD}.containers[].env[]"
RESOURCES = f"{POD}.containers[].resources"
FETCH = f"{POD}.initContainers[].resources"
# `[]` is an item of a list and `{}` the value of a map, in the full manifest.
CHANGES: dict[str, Changes | Refused | NotYet | Planned | Adopts] = {
    "tier": Changes("Mid", without=("workload", *BATCHING)),
    "workload.profile": Changes("Batch", without=BATCHING),
    "workload.inputTokens": Planned({"workload": {"inputTokens": 1000}}, 6000),
    "workload.outputTokens": Planned({"workload": {"outputTokens": 100}}, 6000),
    "workload.requestsPerMinute": Planned({"workload": {"requestsPerMinute": 10}}, 3000),
    "workload.concurrency": Planned({"workload": {"concurrency": 10}}, 2000),
    "model.servedName": Changes("another"),
    "model.source.local.path": Changes("/models/another", EVERY_POD),
    "model.source.huggingFace.repository": Changes("org/other", EVERY_POD, instead=hub()),
    "model.source.huggingFace.revision": Changes("v2", EVERY_POD, instead=hub(revision="v1")),
    "model.source.huggingFace.tokenSecretRef.name": Changes("other", EVERY_POD, instead=hub(**TOKEN)),
    "model.source.huggingFace.tokenSecretRef.key": Changes("other", EVERY_POD, instead=hub(**TOKEN)),
    "model.source.image.reference": Changes("registry.example.com/other:1", EVERY_POD, instead=FROM_IMAGE),
    "model.source.image.pullPolicy": Changes("IfNotPresent", (JOB,), instead=FROM_IMAGE),
    "model.source.persistentVolumeClaim.claimName": Changes("other", EVERY_POD, instead={"model": {"source": CLAIM}}),
    "model.source.persistentVolumeClaim.path": Changes("other", EVERY_POD, instead={"model": {"source": CLAIM}}),
    "model.configMapRef.name": Changes("other", (JOB,), instead=CONFIG),
    "model.configMapRef.key": Changes("other.json", (JOB,), instead=CONFIG),
    "model.cache.size": Changes("2Ti", (CLAIM_OBJECT,), instead=CACHED),
    "model.cache.storageClassName": Changes("slow", (CLAIM_OBJECT,), instead=CACHED),
    "model.cache.accessMode": Changes("ReadWriteMany", (CLAIM_OBJECT,), instead=CACHED),
    "accelerator.type": Changes(
        "CPU", EVERY_POD, without=("engine.gpuMemoryUtilizationPercent", "accelerator.products")
    ),
    "accelerator.products[]": Changes("L4"),
    "parallelism.tensor": Changes(4, instead={"parallelism": {"tensor": 2}}),
    "parallelism.pipeline": NotYet({"parallelism": {"pipeline": 2}}, "pipelineParallelSize=2"),
    "quantization.method": NotYet({"quantization": {"method": "AWQ"}}, "quantization=AWQ"),
    "quantization.kvCache": NotYet({"quantization": {"kvCache": "FP8"}}, "kvCache=FP8"),
    "speculation.method": NotYet({"speculation": {"method": "NGram"}}, "speculation=NGram"),
    "speculation.maxDraftTokens": NotYet({"speculation": {"maxDraftTokens": 3}}, "speculation=NGram"),
    f"{DRAFT}.quantizationMethod": NotYet(
        {"speculation": {"draftModel": {"source": {"local": {"path": "d"}}, "quantizationMethod": "AWQ"}}}, DRAFTS
    ),
    f"{DRAFT}.source.local.path": NotYet(draft(), DRAFTS),
    f"{DRAFT}.source.huggingFace.repository": NotYet(draft(huggingFace={"repository": "org/name"}), DRAFTS),
    f"{DRAFT}.source.huggingFace.revision": NotYet(
        draft(huggingFace={"repository": "org/name", "revision": "v1"}), DRAFTS
    ),
    f"{DRAFT}.source.huggingFace.tokenSecretRef.name": NotYet(
        draft(huggingFace={"repository": "org/name", **TOKEN}), DRAFTS
    ),
    f"{DRAFT}.source.huggingFace.tokenSecretRef.key": NotYet(
        draft(huggingFace={"repository": "org/name", **TOKEN}), DRAFTS
    ),
    f"{DRAFT}.source.image.reference": NotYet(draft(**IMAGE), DRAFTS),
    f"{DRAFT}.source.image.pullPolicy": NotYet(draft(**IMAGE), DRAFTS),
    f"{DRAFT}.source.persistentVolumeClaim.claimName": NotYet(draft(**CLAIM), DRAFTS),
    f"{DRAFT}.source.persistentVolumeClaim.path": NotYet(draft(**CLAIM), DRAFTS),
    "objectives.ttft.p95": Planned({"objectives": {"ttft": {"p95": "200ms"}}}, "50ms"),
    "objectives.itl.p95": Planned({"objectives": {"itl": {"p95": "60ms"}}}, "10ms"),
    "budget.maxMonthlyUSD": Planned({"budget": {"maxMonthlyUSD": 5000}}, 100, refused="BudgetExceeded"),
    "budget.enforcement": Planned(
        {"budget": {"maxMonthlyUSD": 100, "enforcement": "Observe"}}, "Enforce", refused="BudgetExceeded"
    ),
    "engine.maxModelLen": Changes(8192),
    "engine.maxNumBatchedTokens": Changes(512),
    "engine.maxNumSeqs": Changes(17),
    "engine.gpuMemoryUtilizationPercent": Changes(81),
    "engine.prefixCaching": Changes("Enabled"),
    "warmup.heartbeatInterval": Changes("0s", kinds=(LIVE, "PrometheusRule")),
    "warmup.timeout": Changes("16m", kinds=(DEPLOYMENT, "PrometheusRule")),
    "rollout.strategy": Changes("Availability"),
    "rollout.progressDeadline": Changes("41m"),
    "rollout.drainTimeout": Changes("6m"),
    "replicas": Changes(1, kinds=(DEPLOYMENT, BUDGET)),
    "runtime.image": Changes("registry.example.com/millstream-runtime:2.0", EVERY_POD),
    "autoscaling.minReplicas": Changes(3, kinds=(SCALER,)),
    "autoscaling.maxReplicas": Changes(6, kinds=(SCALER,)),
    "autoscaling.metrics[].type": Changes("KVCacheUsage", kinds=(SCALER,)),
    "autoscaling.metrics[].target": Changes(7, kinds=(SCALER,)),
    "autoscaling.scaleDownStabilization": Changes("11m", kinds=(SCALER,)),
    "autoscaling.provider": Changes("KEDA", kinds=(SCALER, "ScaledObject")),
    "monitoring.mode": Changes("Disabled", kinds=MONITORS),
    "monitoring.labels{}": Changes("other", kinds=MONITORS),
    "runtime.updatePolicy": Adopts("FollowOperator"),
    "runtime.logLevel": Changes("Error", kinds=(LIVE,)),
    "service.type": Changes("LoadBalancer", kinds=(SERVICE,)),
    "service.port": Changes(8081, kinds=(SERVICE,)),
    "network.mode": Refused("Disabled", "takes neither ingress nor egress"),
    **{
        f"network.{peer}.{selector}.matchLabels{{}}": Changes("other", kinds=(POLICY,))
        for peer in ("ingress[]", "egress[].to[]")
        for selector in ("namespaceSelector", "podSelector")
    },
    "network.ingress[].ipBlock.cidr": Changes("192.0.0.0/16", kinds=(POLICY,)),
    "network.ingress[].ipBlock.except[]": Changes("192.0.2.16/29", kinds=(POLICY,)),
    "network.egress[].to[].ipBlock.cidr": Changes("198.51.0.0/16", kinds=(POLICY,)),
    "network.egress[].to[].ipBlock.except[]": Changes("198.51.100.16/29", kinds=(POLICY,)),
    "network.egress[].ports[].port": Changes(4316, kinds=(POLICY,)),
    "network.egress[].ports[].endPort": Changes(4319, kinds=(POLICY,)),
    "network.egress[].ports[].protocol": Changes("SCTP", kinds=(POLICY,)),
    "auth.mode": Refused("Disabled", "takes no apiKeysSecretRef"),
    "auth.apiKeysSecretRef.name": Changes("other-keys"),
    "auth.apiKeysSecretRef.key": Changes("other"),
    "podTemplate.metadata.labels{}": Changes("ranking"),
    "podTemplate.metadata.annotations{}": Changes("ranking@example.com"),
    f"{POD}.nodeSelector{{}}": Changes("nvme", EVERY_POD),
    f"{POD}.tolerations[].key": Changes("preemptible", EVERY_POD),
    f"{POD}.tolerations[].operator": Changes("Exists", EVERY_POD, without=(f"{POD}.tolerations[0].value",)),
    f"{POD}.tolerations[].value": Changes("false", EVERY_POD),
    f"{POD}.tolerations[].effect": Changes(
        "NoSchedule", EVERY_POD, without=(f"{POD}.tolerations[0].tolerationSeconds",)
    ),
    f"{POD}.tolerations[].tolerationSeconds": Changes(61, EVERY_POD),
    f"{POD}.priorityClassName": Changes("low", EVERY_POD),
    f"{POD}.runtimeClassName": Changes("kata"),
    f"{POD}.imagePullSecrets[].name": Changes("other-registry", EVERY_POD),
    f"{POD}.containers[].name": Refused("sidecar", "runtime"),
    f"{ENV}.name": Changes("OTHER", EVERY_POD),
    f"{ENV}.value": Changes("2", EVERY_POD),
    f"{ENV}.valueFrom.secretKeyRef.name": Changes("other-tokens", EVERY_POD),
    f"{ENV}.valueFrom.secretKeyRef.key": Changes("other", EVERY_POD),
    f"{ENV}.valueFrom.secretKeyRef.optional": Changes(False, EVERY_POD),
    f"{ENV}.valueFrom.configMapKeyRef.name": Changes("other-settings", EVERY_POD),
    f"{ENV}.valueFrom.configMapKeyRef.key": Changes("other", EVERY_POD),
    f"{ENV}.valueFrom.configMapKeyRef.optional": Changes(False, EVERY_POD),
    f"{POD}.initContainers[].name": Refused("another", "fetch-model"),
    f"{FETCH}.requests.cpu": Changes("1", EVERY_POD, instead=hub()),
    f"{FETCH}.requests.memory": Changes("512Mi", EVERY_POD, instead=hub()),
    f"{FETCH}.requests.ephemeral-storage": Changes("2Gi", EVERY_POD, instead=hub()),
    f"{FETCH}.limits.cpu": Changes("6", EVERY_POD, instead=hub()),
    f"{FETCH}.limits.memory": Changes("13Gi", EVERY_POD, instead=hub()),
    f"{FETCH}.limits.ephemeral-storage": Changes("5Gi", EVERY_POD, instead=hub()),
    f"{RESOURCES}.requests.cpu": Changes("4"),
    f"{RESOURCES}.requests.memory": Changes("7Gi"),
    f"{RESOURCES}.requests.ephemeral-storage": Changes("2Gi"),
    f"{RESOURCES}.limits.cpu": Changes("6"),
    f"{RESOURCES}.limits.memory": Changes("13Gi"),
    f"{RESOURCES}.limits.ephemeral-storage": Changes("4Gi"),
}
# The full manifest says here what the default is, or defaults of what it says itself: leaving it out changes nothing.
SAYS_THE_DEFAULT = {"accelerator.type", "monitoring.mode", "tier", "workload.profile"}


def leaves(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Every leaf field of an API type, by its YAML path."""
    for name, field in model.model_fields.items():
        here = f"{path}.{field.alias or name}" if path else field.alias or name
        yield from leaves_of(field.annotation, here)


def leaves_of(annotation: Any, path: str) -> Iterator[str]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from leaves_of(arguments[0], path)
    elif origin in (typing.Union, types.UnionType):
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        yield from leaves_of(inner, path)
    elif origin is list:
        yield from leaves_of(arguments[0], f"{path}[]")
    elif origin is dict and arguments[1] is not Any:
        yield from leaves_of(arguments[1], f"{path}{{}}")
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from leaves(annotation, path)
    else:
        assert origin is dict or (isinstance(annotation, type) and issubclass(annotation, (str, int, Enum))), path
        yield path


def place(spec: Any, path: str) -> tuple[Any, str | int]:
    """Parent and key of a path's first occurrence in the full manifest. Parents that are absent are made."""
    steps = re.findall(r"[^.\[\]{}]+|\[\d*\]|\{\}", path)
    candidates: list[Any] = [spec]
    for step, following in zip(steps, [*steps[1:], ""], strict=True):
        if step == "{}":
            return candidates[0], next(iter(candidates[0]))
        if step == "[]" and not following:
            return candidates[0], 0  # the first of plain items
        if step.startswith("["):
            index = step[1:-1]
            candidates = [x for items in candidates for x in ([items[int(index)]] if index else items)]
            continue
        if not following:
            with_it = [candidate for candidate in candidates if step in candidate]
            return (with_it or candidates)[0], step
        candidates = [candidate[step] for candidate in candidates if step in candidate]
    raise AssertionError(path)


LONG = {**CONFIG_JSON, "max_position_embeddings": 1 << 17}  # a model that allows what the fields ask for
DEFAULTS = PlanDefaults(runtime_image="registry.example.com/default:1")
# A cluster of three kinds of nodes, and a model that any of their GPUs holds.
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
CATALOG = load_catalog()
NODES = ["L4:8"] * 8 + ["A100-80GB:8"] * 4 + ["H100-80GB-SXM:8"] * 4
FACTS = Facts(
    shape=known_shape(MODEL), inventory=inventory_of(parse_island(CATALOG, text) for text in NODES), catalog=CATALOG
)
# And one of a single product: no field may work only by choosing another product.
ONE_PRODUCT = replace(FACTS, inventory=inventory_of(parse_island(CATALOG, "A100-80GB:8") for _ in range(16)))
LOADS = ("workload.requestsPerMinute", "workload.concurrency")  # on one product they decide about replicas alone


def applied(stored: Manifest, facts: Facts | None = None) -> Objects:
    """What would be applied to the cluster, by kind: first, where the plan needs it, the Job that inspects the model.

    The boot ConfigMap is the Deployment's: that names it by its content.
    """
    owner = parse(stored)
    image = (owner.spec.runtime.image if owner.spec.runtime else None) or DEFAULTS.runtime_image
    jobs = [inspect_job(owner, subject, image, PodDefaults()) for subject in subjects(owner, DEFAULTS).values()]
    known = Facts(read_shape(LONG)) if jobs else None
    pin = choose(owner, DEFAULTS, PodDefaults(), [], facts or known)
    rendered = [*jobs, *objects(owner, pin.revision), *companions_of(owner)]
    return {one["kind"]: one for one in rendered if not one.get("immutable")}


def companions_of(owner: LLMDeployment) -> Iterator[Manifest]:
    """The companions of the model, in a cluster without any of the optional kinds and in one with all of them."""
    defaults = CompanionDefaults("http://prometheus:9090")
    everything = (SCALED_OBJECT, POD_MONITOR, PROMETHEUS_RULE)
    for served in ((), everything):
        if isinstance(scaler := autoscaler(owner, served, defaults), Autoscaler):
            yield scaler.manifest
    yield from monitors(owner, everything, defaults)


def on_a_gpu(**spec: Any) -> Manifest:
    return manifest(model={"source": {"huggingFace": {"repository": MODEL}}}, accelerator={"type": "GPU"}, **spec)


def changed_kinds(before: Objects, after: Objects) -> set[str]:
    return {kind for kind in before.keys() | after.keys() if before.get(kind) != after.get(kind)}


def without(stored: Manifest, paths: tuple[str, ...]) -> Manifest:
    stored = copy.deepcopy(stored)
    for path in paths:
        parent, key = place(stored["spec"], path)
        del parent[key]
    return stored


def test_every_field_has_a_change_and_every_change_a_field() -> None:
    assert set(leaves(LLMDeploymentSpec)) == set(CHANGES)


def test_the_walk_notices_a_new_field_at_any_depth() -> None:
    class Inner(BaseModel):
        deep: int | None = None

    class Added(LLMDeploymentSpec):
        fresh: list[Inner] | None = None

    assert set(leaves(Added)) - set(CHANGES) == {"fresh[].deep"}


@pytest.mark.parametrize("path", CHANGES)
def test_a_field_changed_alone_changes_what_is_applied_or_is_refused(path: str) -> None:
    change = CHANGES[path]
    if isinstance(change, NotYet):
        stored = full_manifest()
        stored["spec"] |= copy.deepcopy(change.spec)
        with pytest.raises(PlanRefused, match=re.escape(f"({change.requirement})")):
            applied(stored)
        return
    if isinstance(change, Planned):
        changes_the_plan_or_is_refused(path, change)
        return
    if isinstance(change, Adopts):
        takes_over_what_an_older_operator_pinned(path, change)
        return
    base = without(full_manifest(), change.without if isinstance(change, Changes) else ())
    base["spec"] |= copy.deepcopy(change.instead) if isinstance(change, Changes) else {}
    mutated = copy.deepcopy(base)
    parent, key = place(mutated["spec"], path)
    if isinstance(change, Refused):
        parent[key] = change.value
        with pytest.raises(ManifestError, match=change.words):
            parse(mutated)
        return
    assert parent[key] != change.to, "the full manifest already says so"
    parent[key] = change.to
    assert changed_kinds(applied(base), applied(mutated)) == set(change.kinds)


@pytest.mark.parametrize(
    "path", [path for path, one in CHANGES.items() if isinstance(one, Changes) and not {*EVERY_POD} & {*one.kinds}]
)
def test_a_field_that_reaches_no_pod_keeps_the_plan(path: str) -> None:
    """Another hash would plan anew by today's facts, and could end in other pods."""
    change = CHANGES[path]
    assert isinstance(change, Changes)
    base = without(full_manifest(), change.without)
    base["spec"] |= copy.deepcopy(change.instead)
    mutated = copy.deepcopy(base)
    parent, key = place(mutated["spec"], path)
    parent[key] = change.to
    assert input_hash(parse(base)) == input_hash(parse(mutated)), "name the field in planning/restart_fields.py"


def changes_the_plan_or_is_refused(path: str, change: Planned) -> None:
    base = on_a_gpu(**copy.deepcopy(change.spec))
    mutated = copy.deepcopy(base)
    parent, key = place(mutated["spec"], path)
    assert parent[key] != change.to
    parent[key] = change.to
    before = applied(base, FACTS)
    if change.refused is None:
        assert changed_kinds(before, applied(mutated, FACTS)) == {DEPLOYMENT}, change.to
        return
    with pytest.raises(PlanRefused) as refused:
        applied(mutated, FACTS)
    assert refused.value.problem.reason == change.refused


@pytest.mark.parametrize("path", [path for path, change in CHANGES.items() if isinstance(change, Planned)])
def test_on_one_product_a_planned_field_changes_what_is_applied_or_is_refused(path: str) -> None:
    change = CHANGES[path]
    assert isinstance(change, Planned)
    base = on_a_gpu(**copy.deepcopy(change.spec))
    mutated = copy.deepcopy(base)
    parent, key = place(mutated["spec"], path)
    parent[key] = change.to
    if path in LOADS:
        before, after = (planned(one)["replicas"] for one in (base, mutated))
        assert before != after
        return
    before = applied(base, ONE_PRODUCT)
    assert changed_kinds(before, applied_or_refused(mutated)) in ({DEPLOYMENT}, set(before))


@pytest.mark.parametrize("path", [path for path, change in CHANGES.items() if isinstance(change, Changes)])
def test_on_one_product_a_field_changes_what_is_applied_or_is_refused(path: str) -> None:
    change = CHANGES[path]
    assert isinstance(change, Changes)
    base = without(full_manifest(), change.without)
    base["spec"] |= copy.deepcopy(change.instead)
    mutated = copy.deepcopy(base)
    parent, key = place(mutated["spec"], path)
    parent[key] = change.to
    before = applied(base, ONE_PRODUCT)
    after = applied_or_refused(mutated)
    if not after:
        assert path in ("accelerator.products[]", "accelerator.type")  # no other product, and too large for a CPU
        return
    assert changed_kinds(before, after) == set(change.kinds)


def applied_or_refused(stored: Manifest) -> Objects:
    """What would be applied on one product; nothing where the plan is refused."""
    try:
        return applied(stored, ONE_PRODUCT)
    except PlanRefused:
        return {}


def planned(stored: Manifest) -> Manifest:
    """status.plan on one product."""
    found: Manifest = choose(parse(stored), DEFAULTS, PodDefaults(), [], ONE_PRODUCT).revision.plan
    return found


def takes_over_what_an_older_operator_pinned(path: str, change: Adopts) -> None:
    owner = parse(manifest())
    older = choose(owner, PlanDefaults("registry.example.com/default:0"), PodDefaults(), []).revision
    record = controller_revision(owner, older, 1)
    changed = manifest(runtime={})
    parent, key = place(changed["spec"], path)
    parent[key] = change.to
    pinning = Pinning(NoFacts(), DEFAULTS, PodDefaults())
    assert chosen_pin(pinning, owner, [record]).revision == older
    assert chosen_pin(pinning, parse(changed), [record]).revision.image == DEFAULTS.runtime_image


@pytest.mark.parametrize("path", [path for path, change in CHANGES.items() if isinstance(change, Planned)])
def test_what_needs_gpus_and_shape_is_refused_by_name_where_they_are_not_known(path: str) -> None:
    change = CHANGES[path]
    assert isinstance(change, Planned)
    stored = on_a_gpu(**copy.deepcopy(change.spec))
    for facts, missing in ((None, "inventory"), (replace(FACTS, shape=None), "modelShape")):
        with pytest.raises(PlanRefused, match=re.escape(f"({missing})")):
            applied(stored, facts)


@pytest.mark.parametrize("path", [path for path, change in CHANGES.items() if isinstance(change, Changes)])
def test_a_field_left_out_changes_what_is_applied_or_is_refused(path: str) -> None:
    """The full manifest says nowhere what the default says, so silence must be heard as well."""
    stored = full_manifest()
    stored["spec"] |= copy.deepcopy(CHANGES[path].instead)  # type: ignore[union-attr]
    mutated = without(stored, (path,))
    try:
        after = applied(mutated)
    except ManifestError:
        return  # it is required, by its type or by a rule
    assert bool(changed_kinds(applied(stored), after)) == (path not in SAYS_THE_DEFAULT)
