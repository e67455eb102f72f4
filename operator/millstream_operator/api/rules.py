"""Rules across fields, each written twice: in CEL for the API server, in Python for a laptop and the operator.

A rule stands at a path of the schema; `self` in CEL and the argument of `holds` are the value there, and the rule
is skipped where that value is absent, as the API server does. The message is the same on both sides.
`tests/unit/operator/api/test_rules.py` evaluates both on the same cases and demands that they agree.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from millstream_operator.api import duration
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.validation.affinity_rules import AFFINITY_RULES
from millstream_operator.api.validation.quantization_rules import QUANTIZATION_RULES
from millstream_operator.api.validation.rule import Rule, qualified_keys
from millstream_operator.api.validation.tuning_rules import TUNING_RULES

NAME_MAX_LENGTH = 52  # a ControllerRevision's and a pod's name add up to eleven characters, and 63 is the limit
NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
DEFAULT_WARMUP_TIMEOUT = "20m"
OPERATOR_LABEL_PREFIXES = ("millstream.dev/", "app.kubernetes.io/", "llm-d.ai/")
OPERATOR_ANNOTATION_PREFIXES = ("millstream.dev/", "prometheus.io/")


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that does not hold. `path` has indices in place of `[]`, as in `spec.x[0].y`.

    `shown`: the part of the value there that breaks it; None: the whole value.
    """

    path: str
    message: str
    shown: Any = None

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


def violations(deployment: LLMDeployment) -> Iterator[Violation]:
    """The rules that `deployment` breaks, in the order of `RULES`."""
    for rule in RULES:
        for path, value in values_at(deployment, rule.path):
            if not rule.holds(value):
                yield Violation(path, rule.message)


def values_at(deployment: LLMDeployment, path: str) -> Iterator[tuple[str, Any]]:
    """Every present value at a schema path such as `spec.x[].y`, each with its own path, as `spec.x[0].y`."""
    return _values(deployment, path.split(".") if path else [])


def _values(value: Any, steps: Sequence[str], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every present value at a schema path, with its own path."""
    if value is None:
        return
    if not steps:
        yield path, value
        return
    name = steps[0].removesuffix("[]")
    child = getattr(value, _attribute(value.__class__, name))
    here = f"{path}.{name}" if path else name
    if not steps[0].endswith("[]"):
        yield from _values(child, steps[1:], here)
        return
    for index, item in enumerate(child or []):
        yield from _values(item, steps[1:], f"{here}[{index}]")


@functools.cache
def _attribute(model: type[BaseModel], alias: str) -> str:
    return next(name for name, field in model.model_fields.items() if alias in (name, field.alias))


def _within(low: str, high: str) -> tuple[str, Callable[[str], bool]]:
    """CEL and Python for "a duration from `low` to `high`"."""
    cel = f"duration(self) >= duration('{low}') && duration(self) <= duration('{high}')"
    return cel, lambda value: duration.seconds(low) <= duration.seconds(value) <= duration.seconds(high)


def _duration(path: str, low: str, high: str) -> Rule:
    cel, holds = _within(low, high)
    return Rule(path, cel, holds, f"must be a duration from {low} to {high}.")


def _one_source(path: str) -> Rule:
    return Rule(
        path,
        "[has(self.local), has(self.huggingFace), has(self.image), has(self.persistentVolumeClaim)]"
        ".filter(present, present).size() == 1",
        lambda value: _count(value.local, value.hugging_face, value.image, value.persistent_volume_claim) == 1,
        "give exactly one source: local, huggingFace, image or persistentVolumeClaim.",
    )


def _pulled(path: str) -> Rule:
    return Rule(
        path,
        "self != 'Never'",
        lambda value: value != "Never",
        "Never leaves the pods without a model, because nothing else pulls the image; use IfNotPresent.",
    )


def _latency(path: str) -> Rule:
    return Rule(
        path,
        "duration(self) >= duration('1ms') && duration(self) <= duration('1h')",
        lambda value: 1 <= duration.milliseconds(value) <= 3_600_000,
        "must be a latency from 1ms to 1h.",
    )


def _no_prefix(path: str, prefixes: Sequence[str]) -> Rule:
    tests = " || ".join(f"key.startsWith('{prefix}')" for prefix in prefixes)
    return Rule(
        path,
        f"!self.exists(key, {tests})",
        lambda value: not any(key.startswith(tuple(prefixes)) for key in value),
        f"keys that start with {' or '.join(prefixes)} are the operator's own; use another prefix.",
    )


def _peer(path: str) -> Rule:
    return Rule(
        path,
        "has(self.ipBlock) != (has(self.namespaceSelector) || has(self.podSelector))",
        lambda value: (value.ip_block is None) == (_count(value.namespace_selector, value.pod_selector) > 0),
        "give either ipBlock, or namespaceSelector, podSelector or both.",
    )


def _count(*values: object) -> int:
    return sum(value is not None for value in values)


def _deadline_covers_warmup(spec: Any) -> bool:
    if spec.rollout is None or spec.rollout.progress_deadline is None:
        return True
    timeout = (spec.warmup and spec.warmup.timeout) or DEFAULT_WARMUP_TIMEOUT
    return duration.seconds(spec.rollout.progress_deadline) > duration.seconds(timeout)


RULES: tuple[Rule, ...] = (
    Rule(
        "",
        f"self.metadata.name.size() <= {NAME_MAX_LENGTH} && self.metadata.name.matches('{NAME_PATTERN}')",
        lambda value: len(value.name) <= NAME_MAX_LENGTH and re.fullmatch(NAME_PATTERN, value.name) is not None,
        "metadata.name must be a DNS label that starts with a letter, of at most 52 characters (a-z, 0-9 and -): "
        "the Service and the pods are named after it.",
    ),
    _one_source("spec.model.source"),
    *QUANTIZATION_RULES,
    Rule(
        "spec",
        "!has(self.model.cache) || !has(self.model.cache.accessMode) || "
        "self.model.cache.accessMode == 'ReadWriteMany' || !has(self.replicas) || self.replicas <= 1",
        lambda value: (
            value.model.cache is None or value.model.cache.access_mode in (None, "ReadWriteMany") or value.replicas <= 1
        ),
        "model.cache.accessMode must be ReadWriteMany where replicas is more than 1: replicas on another node could "
        "not mount the volume.",
    ),
    _one_source("spec.speculation.draftModel.source"),
    _one_source("spec.quantization.qualityGate.base"),
    _pulled("spec.model.source.image.pullPolicy"),
    _pulled("spec.speculation.draftModel.source.image.pullPolicy"),
    Rule(
        "spec.speculation",
        "!(has(self.method) && self.method == 'DraftModel') || has(self.draftModel)",
        lambda value: value.method != "DraftModel" or value.draft_model is not None,
        "method DraftModel needs draftModel.",
    ),
    Rule(
        "spec.speculation",
        "!(has(self.method) && (self.method == 'Disabled' || self.method == 'NGram')) || !has(self.draftModel)",
        lambda value: value.method not in ("Disabled", "NGram") or value.draft_model is None,
        "methods Disabled and NGram take no draftModel.",
    ),
    Rule(
        "spec.speculation",
        "!(has(self.method) && self.method == 'Disabled') || !has(self.maxDraftTokens)",
        lambda value: value.method != "Disabled" or value.max_draft_tokens is None,
        "method Disabled takes no maxDraftTokens.",
    ),
    Rule(
        "spec.speculation",
        "!(has(self.method) && self.method == 'Disabled') || !has(self.governor)",
        lambda value: value.method != "Disabled" or value.governor is None,
        "method Disabled takes no governor: nothing is proposed.",
    ),
    *TUNING_RULES,
    Rule(
        "spec.speculation",
        "!(has(self.acceptance) && self.acceptance == 'Distribution') || has(self.draftModel)",
        lambda value: value.acceptance != "Distribution" or value.draft_model is not None,
        "acceptance Distribution needs draftModel: only its drafts have probabilities.",
    ),
    Rule(
        "spec",
        "!(has(self.accelerator) && has(self.accelerator.type) && self.accelerator.type == 'CPU') || "
        "(!has(self.accelerator.products) && !has(self.parallelism) && !has(self.budget))",
        lambda value: (
            not (value.accelerator and value.accelerator.type == "CPU")
            or (value.accelerator.products is None and value.parallelism is None and value.budget is None)
        ),
        "accelerator.products, parallelism and budget are about GPUs; leave them out with accelerator.type CPU.",
    ),
    _latency("spec.objectives.ttft.p95"),
    _latency("spec.objectives.itl.p95"),
    Rule(
        "spec.engine",
        "!has(self.maxNumBatchedTokens) || !has(self.maxNumSeqs) || self.maxNumBatchedTokens >= self.maxNumSeqs",
        lambda value: (
            value.max_num_batched_tokens is None
            or value.max_num_seqs is None
            or value.max_num_batched_tokens >= value.max_num_seqs
        ),
        "maxNumBatchedTokens must be at least maxNumSeqs, or a full batch could not compute one token per request.",
    ),
    Rule(
        "spec",
        "!(has(self.engine) && has(self.engine.gpuMemoryUtilizationPercent) && has(self.accelerator) "
        "&& has(self.accelerator.type) && self.accelerator.type == 'CPU')",
        lambda value: (
            not (
                value.engine
                and value.engine.gpu_memory_utilization_percent is not None
                and value.accelerator
                and value.accelerator.type == "CPU"
            )
        ),
        "engine.gpuMemoryUtilizationPercent needs accelerator.type GPU; leave it out on a CPU.",
    ),
    Rule(
        "spec",
        "!(has(self.engine) && has(self.engine.dtype)) || (has(self.accelerator) && has(self.accelerator.type) "
        "&& self.accelerator.type == 'CPU')",
        lambda value: (
            not (value.engine and value.engine.dtype is not None)
            or (value.accelerator is not None and value.accelerator.type == "CPU")
        ),
        "engine.dtype needs accelerator.type CPU; leave it out on a GPU, which computes in the checkpoint's dtype.",
    ),
    _duration("spec.warmup.heartbeatInterval", "0s", "24h"),
    _duration("spec.warmup.timeout", "1s", "24h"),
    _duration("spec.rollout.progressDeadline", "1s", "48h"),
    _duration("spec.rollout.drainTimeout", "1s", "24h"),
    _duration("spec.rollout.evidenceTimeout", "10s", "48h"),
    Rule(
        "spec",
        "!has(self.rollout) || !has(self.rollout.progressDeadline) || duration(self.rollout.progressDeadline) > "
        f"duration(has(self.warmup) && has(self.warmup.timeout) ? self.warmup.timeout : '{DEFAULT_WARMUP_TIMEOUT}')",
        _deadline_covers_warmup,
        f"rollout.progressDeadline must be longer than warmup.timeout ({DEFAULT_WARMUP_TIMEOUT} where absent), "
        "or a rollout would be called failed while a pod still has time to get ready.",
    ),
    Rule(
        "spec.auth",
        "!(has(self.mode) && self.mode == 'Enabled') || has(self.apiKeysSecretRef)",
        lambda value: value.mode != "Enabled" or value.api_keys_secret_ref is not None,
        "mode Enabled needs apiKeysSecretRef.",
    ),
    Rule(
        "spec.auth",
        "!(has(self.mode) && self.mode == 'Disabled') || !has(self.apiKeysSecretRef)",
        lambda value: value.mode != "Disabled" or value.api_keys_secret_ref is None,
        "mode Disabled takes no apiKeysSecretRef.",
    ),
    Rule(
        "spec.network",
        "!(has(self.mode) && self.mode == 'Disabled') || (!has(self.ingress) && !has(self.egress))",
        lambda value: value.mode != "Disabled" or (value.ingress is None and value.egress is None),
        "mode Disabled takes neither ingress nor egress: there is no policy to put them into.",
    ),
    _peer("spec.network.ingress[]"),
    _peer("spec.network.egress[].to[]"),
    *(
        qualified_keys(f"{peer}.{selector}.matchLabels")
        for peer in ("spec.network.ingress[]", "spec.network.egress[].to[]")
        for selector in ("namespaceSelector", "podSelector")
    ),
    Rule(
        "spec.network.egress[].to[].ipBlock",
        "!self.cidr.startsWith('169.254.')",
        lambda value: not value.cidr.startswith("169.254."),
        "169.254.0.0/16 is link-local: metadata services give away the node's credentials, and stay closed.",
    ),
    Rule(
        "spec.network.egress[].ports[]",
        "!has(self.endPort) || self.endPort >= self.port",
        lambda value: value.end_port is None or value.end_port >= value.port,
        "endPort must be at least port.",
    ),
    Rule(
        "spec.autoscaling",
        "!has(self.minReplicas) || self.minReplicas <= self.maxReplicas",
        lambda value: value.min_replicas is None or value.min_replicas <= value.max_replicas,
        "minReplicas must be at most maxReplicas.",
    ),
    Rule(
        "spec.autoscaling",
        "!(has(self.minReplicas) && self.minReplicas == 0 && has(self.provider) && self.provider == 'HPA')",
        lambda value: not (value.min_replicas == 0 and value.provider == "HPA"),
        "minReplicas 0 needs KEDA: a HorizontalPodAutoscaler keeps at least 1.",
    ),
    Rule(
        "spec.autoscaling.metrics",
        "self.all(one, self.filter(other, other.type == one.type).size() == 1)",
        lambda value: len({one.type for one in value}) == len(value),
        "name each type once.",
    ),
    Rule(
        "spec.autoscaling.metrics[]",
        "self.type != 'KVCacheUsage' || self.target <= 100",
        lambda value: value.type != "KVCacheUsage" or value.target <= 100,
        "the target of KVCacheUsage is a percentage, 1 to 100.",
    ),
    _duration("spec.autoscaling.scaleDownStabilization", "0s", "1h"),
    qualified_keys("spec.monitoring.labels"),
    _no_prefix("spec.monitoring.labels", OPERATOR_LABEL_PREFIXES),
    qualified_keys("spec.podTemplate.metadata.labels"),
    _no_prefix("spec.podTemplate.metadata.labels", OPERATOR_LABEL_PREFIXES),
    qualified_keys("spec.podTemplate.metadata.annotations"),
    _no_prefix("spec.podTemplate.metadata.annotations", OPERATOR_ANNOTATION_PREFIXES),
    qualified_keys("spec.podTemplate.spec.nodeSelector"),
    *AFFINITY_RULES,
    Rule(
        "spec.podTemplate.spec.tolerations[]",
        "has(self.operator) && self.operator == 'Exists' ? !has(self.value) : has(self.key)",
        lambda value: value.value is None if value.operator == "Exists" else value.key is not None,
        "operator Exists takes no value; operator Equal needs a key.",
    ),
    Rule(
        "spec.podTemplate.spec.tolerations[]",
        "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
        lambda value: value.toleration_seconds is None or value.effect == "NoExecute",
        "tolerationSeconds needs effect NoExecute.",
    ),
    Rule(
        "spec.podTemplate.spec.containers[].env[]",
        "!self.name.startsWith('MILLSTREAM_') || self.name.startsWith('MILLSTREAM_LOG_')",
        lambda value: not value.name.startswith("MILLSTREAM_") or value.name.startswith("MILLSTREAM_LOG_"),
        "names that start with MILLSTREAM_ are the operator's own, but for MILLSTREAM_LOG_LEVEL and the like.",
    ),
    Rule(
        "spec.podTemplate.spec.containers[].env[]",
        "has(self.value) != has(self.valueFrom)",
        lambda value: (value.value is None) != (value.value_from is None),
        "give exactly one of value and valueFrom.",
    ),
    Rule(
        "spec.podTemplate.spec.containers[].env[].valueFrom",
        "has(self.secretKeyRef) != has(self.configMapKeyRef)",
        lambda value: (value.secret_key_ref is None) != (value.config_map_key_ref is None),
        "give exactly one of secretKeyRef and configMapKeyRef.",
    ),
)
