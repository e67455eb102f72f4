"""Every field works or is rejected: each one is changed alone, and something that is applied must change with it.

The spec's types are walked, so a field that is added to them without an entry in `CHANGES` fails here. What counts is
what the cluster is told (the Deployment, the Service, …), not the record of it: that one carries a hash of the whole
spec and would change with a field that nobody reads.
"""

from __future__ import annotations

import copy
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from enum import Enum
from typing import Any

import pytest
from pydantic import BaseModel

from millstream_operator.api.load import ManifestError, parse
from millstream_operator.api.spec import LLMDeploymentSpec
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.reconciling.inspection import subjects
from millstream_operator.reconciling.revisions import PlanRefused, choose
from millstream_operator.rendering.inspect_job import inspect_job
from millstream_operator.rendering.objects import objects
from millstream_operator.rendering.pod_defaults import PodDefaults
from tests.support.fake_operator import CONFIG as CONFIG_JSON
from tests.support.llmdeployments import full_manifest

Manifest = dict[str, Any]
Objects = dict[str, Manifest]
DEPLOYMENT, SERVICE, BUDGET = "Deployment", "Service", "PodDisruptionBudget"
JOB, CLAIM_OBJECT = "Job", "PersistentVolumeClaim"
EVERY_POD = (DEPLOYMENT, JOB)  # those that serve, and the one that inspects the model before


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
# `[]` is an item of a list and `{}` the value of a map, in the full manifest.
CHANGES: dict[str, Changes | Refused | NotYet] = {
    "tier": Changes("Mid", without=("workload", *BATCHING)),
    "workload.profile": Changes("Batch", without=BATCHING),
    "workload.inputTokens": NotYet({"workload": {"inputTokens": 100}}, "inventory"),
    "workload.outputTokens": NotYet({"workload": {"outputTokens": 100}}, "inventory"),
    "workload.requestsPerMinute": NotYet({"workload": {"requestsPerMinute": 100}}, "inventory"),
    "workload.concurrency": NotYet({"workload": {"concurrency": 100}}, "inventory"),
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
    "parallelism.tensor": NotYet({"parallelism": {"tensor": 2}}, "tensorParallelSize=2"),
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
    "objectives.ttft.p95": NotYet({"objectives": {"ttft": {"p95": "200ms"}}}, "inventory"),
    "objectives.itl.p95": NotYet({"objectives": {"itl": {"p95": "40ms"}}}, "inventory"),
    "budget.maxMonthlyUSD": NotYet({"budget": {"maxMonthlyUSD": 5000}}, "inventory"),
    "budget.enforcement": NotYet({"budget": {"maxMonthlyUSD": 5000, "enforcement": "Observe"}}, "inventory"),
    "engine.maxModelLen": Changes(8192),
    "engine.maxNumBatchedTokens": Changes(512),
    "engine.maxNumSeqs": Changes(17),
    "engine.gpuMemoryUtilizationPercent": Changes(81),
    "engine.prefixCaching": Changes("Enabled"),
    "warmup.heartbeatInterval": Changes("0s"),
    "warmup.timeout": Changes("16m"),
    "rollout.progressDeadline": Changes("41m"),
    "rollout.drainTimeout": Changes("6m"),
    "replicas": Changes(1, kinds=(DEPLOYMENT, BUDGET)),
    "runtime.image": Changes("registry.example.com/millstream-runtime:2.0", EVERY_POD),
    "service.type": Changes("LoadBalancer", kinds=(SERVICE,)),
    "service.port": Changes(8081, kinds=(SERVICE,)),
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
    f"{RESOURCES}.requests.cpu": Changes("4"),
    f"{RESOURCES}.requests.memory": Changes("7Gi"),
    f"{RESOURCES}.requests.ephemeral-storage": Changes("2Gi"),
    f"{RESOURCES}.limits.cpu": Changes("6"),
    f"{RESOURCES}.limits.memory": Changes("13Gi"),
    f"{RESOURCES}.limits.ephemeral-storage": Changes("4Gi"),
}
# The full manifest says here what the default is, or defaults of what it says itself: leaving it out changes nothing.
SAYS_THE_DEFAULT = {"accelerator.type", "tier", "workload.profile"}


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


def applied(stored: Manifest) -> Objects:
    """What the cluster would be told, by kind: first, where the plan needs it, the Job that inspects the model."""
    owner, defaults = parse(stored), PlanDefaults(runtime_image="registry.example.com/default:1")
    wanted = subjects(owner, defaults)
    image = (owner.spec.runtime.image if owner.spec.runtime else None) or defaults.runtime_image
    jobs = [inspect_job(owner, subject, image, PodDefaults()) for subject in wanted.values()]
    facts = Facts(read_shape(CONFIG_JSON)) if wanted else Facts()
    pin = choose(owner, defaults, PodDefaults(), [], facts)
    return {rendered["kind"]: rendered for rendered in [*jobs, *objects(owner, pin.revision)]}


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
