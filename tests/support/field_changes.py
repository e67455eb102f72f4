"""For each field of the API: another value, and the kinds of object that it changes (`test_field_contract.py`).

A path names a field of the full manifest (`llmdeployments.full_manifest`): `[]` is an item of a list, `{}` the value of
a map.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

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
    instead: dict[str, Any] = dataclass_field(default_factory=dict)


@dataclass(frozen=True)
class NotYet:
    """The runtime or the operator lacks what it asks for: it is planned, and refused by that name when applied.

    `spec` replaces whole fields of the full manifest's spec.
    """

    spec: dict[str, Any]
    requirement: str


@dataclass(frozen=True)
class Planned:
    """It decides by the cluster's GPUs and the model's shape: another value, and the kinds of objects that it changes.

    `spec`: fields of a spec that already says something there. `refused`: the reason why the other value is refused
    instead. Where GPUs or shape are not known any value is refused by name.
    """

    spec: dict[str, Any]
    to: Any
    refused: str | None = None
    kinds: tuple[str, ...] = (DEPLOYMENT,)


@dataclass(frozen=True)
class Adopts:
    """It changes nothing by itself: with this value what an older operator pinned is rendered anew."""

    to: Any


@dataclass(frozen=True)
class Decides:
    """It is no part of any object: it decides what the operator does. `test`: the one that shows it."""

    test: str  # below tests/unit/operator


ON_A_CPU: dict[str, Any] = {  # with room for an 8B model in float32
    "accelerator": {"type": "CPU"},
    "engine": {"maxModelLen": 4096},
    "podTemplate": {"spec": {"containers": [{"name": "runtime", "resources": {"limits": {"memory": "64Gi"}}}]}},
}


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
QUANTIZE_JOB, JUDGE_JOB = "Job quantize", "Job quality"  # what prepares a model that the pods then load
TUNE_JOB = "Job tune-draft"
IN_MAP = {"configMapRef": {"name": "data", "key": "c.jsonl"}}
IN_CLAIM = {"persistentVolumeClaim": {"claimName": "data", "path": "c.jsonl"}}
LIMITS = {
    "maxMeanKL": "20m",
    "maxP99KL": "500m",
    "minTop1AgreementPercent": 97,
    "maxFlipPercent": 4,
    "maxPerplexityRatio": "1.05",
}


def quantized(calibration: dict[str, Any] | None = None, dataset: dict[str, Any] | None = None) -> dict[str, Any]:
    """A spec whose model is quantized in the cluster and judged."""
    gate = {"mode": "Observe", "dataset": dataset or IN_MAP, **LIMITS}
    return {
        "model": {"source": {"local": {"path": "demo-chat"}}, "cache": {"size": "1Ti"}},
        "accelerator": {"type": "CPU"},
        "engine": {"maxModelLen": 4096},
        "quantization": {"method": "AWQ", "calibration": copy.deepcopy(calibration or IN_MAP), "qualityGate": gate},
    }


LARGE = {"containers": [{"name": "runtime", "resources": {"limits": {"memory": "64Gi"}}}]}
TUNING_NUMBERS = {"steps": 100, "sequenceTokens": 512, "maxAnswerTokens": 128}


def judged(**base: Any) -> dict[str, Any]:
    """A spec whose model is judged by another."""
    gate = {"dataset": IN_MAP, "base": base or {"local": {"path": "base"}}}
    return {
        "accelerator": {"type": "CPU"},
        "engine": {"maxModelLen": 4096},
        "quantization": {"qualityGate": gate},
        "podTemplate": {"spec": LARGE},
    }


def tuned(dataset: dict[str, Any] | None = None, general: dict[str, Any] | None = None) -> dict[str, Any]:
    """A spec whose draft is tuned in the cluster."""
    tuning = {"dataset": dataset or IN_MAP, "generalDataset": general or IN_MAP, **TUNING_NUMBERS}
    return {
        "model": {"source": {"local": {"path": "demo-chat"}}, "cache": {"size": "1Ti"}},
        "accelerator": {"type": "CPU"},
        "engine": {"maxModelLen": 4096},
        "speculation": {"draftModel": {"source": {"local": {"path": "draft"}}}, "tuning": copy.deepcopy(tuning)},
        "podTemplate": {"spec": LARGE},
    }


BATCHING = ("engine.maxNumBatchedTokens", "engine.maxNumSeqs", "engine.gpuMemoryUtilizationPercent")
DRAFT = "speculation.draftModel"
POD = "podTemplate.spec"
ENV = f"{POD}.containers[].env[]"
RESOURCES = f"{POD}.containers[].resources"
FETCH = f"{POD}.initContainers[].resources"


# `[]` is an item of a list and `{}` the value of a map, in the full manifest.
def affinity_changes() -> dict[str, Changes | Refused]:
    required, preferred = (f"{how}DuringSchedulingIgnoredDuringExecution" for how in ("required", "preferred"))
    node, found = f"{POD}.affinity.nodeAffinity", dict[str, Changes | Refused]()
    for terms in (f"{required}.nodeSelectorTerms[]", f"{preferred}[].preference"):
        found |= _expression(f"{node}.{terms}.matchExpressions[]", EVERY_POD)
    found[f"{node}.{preferred}[].weight"] = Changes(30, EVERY_POD)
    for kind in ("podAffinity", "podAntiAffinity"):
        here = f"{POD}.affinity.{kind}"
        found[f"{here}.{preferred}[].weight"] = Changes(30)
        for term in (f"{here}.{required}[]", f"{here}.{preferred}[].podAffinityTerm"):
            found[f"{term}.namespaces[]"] = Changes("other")
            found[f"{term}.topologyKey"] = Changes("topology.kubernetes.io/zone")
            for selector in (f"{term}.labelSelector", f"{term}.namespaceSelector"):
                found[f"{selector}.matchLabels{{}}"] = Changes("other")
                found |= _expression(f"{selector}.matchExpressions[]", (DEPLOYMENT,))
    return found


def _expression(path: str, kinds: tuple[str, ...]) -> dict[str, Changes | Refused]:
    return {
        f"{path}.key": Changes("other", kinds),
        f"{path}.operator": Changes("NotIn", kinds),
        f"{path}.values[]": Changes("other", kinds),
    }


def dataset_changes(path: str, kinds: tuple[str, ...]) -> dict[str, Changes]:
    in_claim = quantized(IN_CLAIM) if path.endswith("calibration") else quantized(None, IN_CLAIM)
    return {
        f"{path}.configMapRef.name": Changes("other", kinds, instead=quantized()),
        f"{path}.configMapRef.key": Changes("other.jsonl", kinds, instead=quantized()),
        f"{path}.persistentVolumeClaim.claimName": Changes("other", kinds, instead=in_claim),
        f"{path}.persistentVolumeClaim.path": Changes("other.jsonl", kinds, instead=in_claim),
    }


def tuning_changes() -> dict[str, Changes]:
    found = {}
    for name, in_claim in (("dataset", tuned(IN_CLAIM)), ("generalDataset", tuned(None, IN_CLAIM))):
        path = f"speculation.tuning.{name}"
        found[f"{path}.configMapRef.name"] = Changes("other", (TUNE_JOB,), instead=tuned())
        found[f"{path}.configMapRef.key"] = Changes("other.jsonl", (TUNE_JOB,), instead=tuned())
        found[f"{path}.persistentVolumeClaim.claimName"] = Changes("other", (TUNE_JOB,), instead=in_claim)
        found[f"{path}.persistentVolumeClaim.path"] = Changes("other.jsonl", (TUNE_JOB,), instead=in_claim)
    for name, value in TUNING_NUMBERS.items():
        found[f"speculation.tuning.{name}"] = Changes(value + 1, (TUNE_JOB,), instead=tuned())
    return found


def base_changes(path: str) -> dict[str, Changes | Refused]:
    hub = judged(huggingFace={"repository": "org/name", "revision": "v1", **TOKEN})
    return {
        f"{path}.local.path": Changes("/models/another", (JUDGE_JOB,), instead=judged()),
        f"{path}.huggingFace.repository": Changes("org/other", (JUDGE_JOB,), instead=hub),
        f"{path}.huggingFace.revision": Changes("v2", (JUDGE_JOB,), instead=hub),
        f"{path}.huggingFace.tokenSecretRef.name": Changes("other", (JUDGE_JOB,), instead=hub),
        f"{path}.huggingFace.tokenSecretRef.key": Changes("other", (JUDGE_JOB,), instead=hub),
        f"{path}.image.reference": Changes(
            "registry.example.com/other:1", (JUDGE_JOB,), instead=judged(image={"reference": "m:1"})
        ),
        f"{path}.image.pullPolicy": Refused("Always", "takes no pullPolicy", judged(image={"reference": "m:1"})),
        f"{path}.persistentVolumeClaim.claimName": Changes("other", (JUDGE_JOB,), instead=judged(**CLAIM)),
        f"{path}.persistentVolumeClaim.path": Changes("other", (JUDGE_JOB,), instead=judged(**CLAIM)),
    }


CHANGES: dict[str, Changes | Refused | NotYet | Planned | Adopts | Decides] = {
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
    "quantization.method": NotYet({"quantization": {"method": "GGUF"}}, "quantization=GGUF"),
    **dataset_changes("quantization.calibration", (DEPLOYMENT, QUANTIZE_JOB, JUDGE_JOB)),
    **dataset_changes("quantization.qualityGate.dataset", (QUANTIZE_JOB, JUDGE_JOB)),
    **{
        f"quantization.qualityGate.{name}": Changes(to, (JUDGE_JOB,), instead=quantized())
        for name, to in zip(LIMITS, ("30m", "1", 96, 5, "1.06"), strict=True)
    },
    "quantization.qualityGate.mode": Decides(
        "preparation/test_quality_gate.py::test_observe_serves_a_model_that_is_worse_and_says_so"
    ),
    **base_changes("quantization.qualityGate.base"),
    "quantization.kvCache": Changes("FP8", instead={"quantization": {"kvCache": "INT8"}}),
    "speculation.method": Changes(
        "NGram", (DEPLOYMENT, "PrometheusRule"), instead={"speculation": {"method": "Disabled"}}
    ),
    "speculation.governor.mode": Changes(
        "Enforce",
        kinds=(LIVE,),
        instead=ON_A_CPU | {"speculation": {"method": "NGram", "governor": {"mode": "Observe"}}},
    ),
    **tuning_changes(),
    "speculation.maxDraftTokens": Changes(2, instead={"speculation": {"method": "NGram", "maxDraftTokens": 3}}),
    "speculation.acceptance": Changes(  # on a GPU it is refused
        "Identity",
        instead=ON_A_CPU
        | {"speculation": {"draftModel": {"source": {"local": {"path": "d"}}}, "acceptance": "Distribution"}},
    ),
    f"{DRAFT}.quantizationMethod": Decides(
        "planning/test_cpu_drafts.py::test_a_draft_that_does_not_suit_the_model_is_refused_with_the_fix"
    ),
    f"{DRAFT}.source.local.path": Changes("other", EVERY_POD, instead=draft()),
    f"{DRAFT}.source.huggingFace.repository": Changes(
        "org/other", EVERY_POD, instead=draft(huggingFace={"repository": "org/name"})
    ),
    f"{DRAFT}.source.huggingFace.revision": Changes(
        "v2", EVERY_POD, instead=draft(huggingFace={"repository": "org/name", "revision": "v1"})
    ),
    f"{DRAFT}.source.huggingFace.tokenSecretRef.name": Changes(
        "other", EVERY_POD, instead=draft(huggingFace={"repository": "org/name", **TOKEN})
    ),
    f"{DRAFT}.source.huggingFace.tokenSecretRef.key": Changes(
        "other", EVERY_POD, instead=draft(huggingFace={"repository": "org/name", **TOKEN})
    ),
    f"{DRAFT}.source.image.reference": Changes("registry.example.com/other:1", EVERY_POD, instead=draft(**IMAGE)),
    f"{DRAFT}.source.image.pullPolicy": Changes("IfNotPresent", (JOB,), instead=draft(**IMAGE)),
    f"{DRAFT}.source.persistentVolumeClaim.claimName": Changes("other", EVERY_POD, instead=draft(**CLAIM)),
    f"{DRAFT}.source.persistentVolumeClaim.path": Changes("other", EVERY_POD, instead=draft(**CLAIM)),
    "objectives.ttft.p95": Planned({"objectives": {"ttft": {"p95": "200ms"}}}, "50ms"),
    "objectives.itl.p95": Planned({"objectives": {"itl": {"p95": "60ms"}}}, "10ms", kinds=(DEPLOYMENT, LIVE)),
    "budget.maxMonthlyUSD": Planned({"budget": {"maxMonthlyUSD": 5000}}, 100, refused="BudgetExceeded"),
    "budget.enforcement": Planned(
        {"budget": {"maxMonthlyUSD": 100, "enforcement": "Observe"}}, "Enforce", refused="BudgetExceeded"
    ),
    "engine.maxModelLen": Changes(8192),
    "engine.maxNumBatchedTokens": Changes(512),
    "engine.maxNumSeqs": Changes(17),
    "engine.gpuMemoryUtilizationPercent": Changes(81),
    "engine.prefixCaching": Changes("Enabled"),
    "engine.hybridKvCacheManager": Changes("Disabled"),
    "engine.dtype": Changes(
        "float32",  # on a GPU it is refused
        instead=ON_A_CPU | {"engine": {"maxModelLen": 4096, "dtype": "bfloat16"}},
    ),
    "warmup.heartbeatInterval": Changes("0s", kinds=(LIVE, "PrometheusRule")),
    "warmup.timeout": Changes("16m", kinds=(DEPLOYMENT, "PrometheusRule")),
    "rollout.strategy": Changes("Availability"),
    "rollout.progressDeadline": Changes("41m"),
    "rollout.drainTimeout": Changes("6m"),
    "rollout.evidenceTimeout": Decides(
        "rollout/test_staged_shift.py::test_a_stage_that_proceeds_without_evidence_says_so"
    ),
    "rollout.onInsufficientEvidence": Decides(
        "rollout/test_staged_shift.py::test_a_stage_is_held_until_it_has_its_evidence_where_the_spec_says_so"
    ),
    "rollout.retry": Decides("rollout/test_retry.py::test_another_value_of_retry_is_another_attempt"),
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
    "service.allowedOrigins[]": Changes("*", kinds=(LIVE,)),
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
    **affinity_changes(),
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
