"""The rules across fields: CEL for the API server and Python for a laptop give the same verdict on the same cases."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.rules import RULES, violations
from millstream_operator.api.validation.rule import Rule
from tests.support.cel import evaluate
from tests.support.llmdeployments import full_manifest, manifest

Manifest = dict[str, Any]
LOCAL = {"path": "m"}


def source(**sources: Any) -> Manifest:
    return manifest(model={"source": sources})


def pod_spec(**fields: Any) -> Manifest:
    return manifest(podTemplate={"spec": fields})


def toleration(**fields: Any) -> Manifest:
    return pod_spec(tolerations=[fields])


def env(**fields: Any) -> Manifest:
    return pod_spec(containers=[{"name": "runtime", "env": [{"name": "A", "value": "1"}, fields]}])


def metadata(**fields: Any) -> Manifest:
    return manifest(podTemplate={"metadata": fields})


def made(**quantization: Any) -> Manifest:
    return manifest(model={"source": {"local": LOCAL}, "cache": {"size": "1Gi"}}, quantization=quantization)


DATASET = {"configMapRef": {"name": "c", "key": "k"}}


def tuned(cache: Manifest | None = None, **tuning: Any) -> Manifest:
    draft = {"draftModel": {"source": {"local": LOCAL}}, "tuning": tuning}
    return manifest(
        model={"source": {"local": LOCAL}, "cache": {"size": "1Gi"} | (cache or {})}, speculation=draft, replicas=1
    )


SECRET = {"secretKeyRef": {"name": "n", "key": "k"}}
CONFIG = {"configMapKeyRef": {"name": "n", "key": "k"}}

GOOD: dict[str, Manifest] = {
    "smallest": manifest(),
    "fullest": full_manifest(),
    "longest name": manifest("d" * 52),
    "one letter": manifest("d"),
    "tokens equal sequences": manifest(engine={"maxNumBatchedTokens": 64, "maxNumSeqs": 64}),
    "utilization, accelerator left open": manifest(accelerator={}, engine={"gpuMemoryUtilizationPercent": 50}),
    "heartbeats off": manifest(warmup={"heartbeatInterval": "0s"}),
    "a day": manifest(warmup={"heartbeatInterval": "24h", "timeout": "24h"}, rollout={"drainTimeout": "24h"}),
    "deadline just above the default": manifest(rollout={"progressDeadline": "20m1s"}),
    "deadline above a short warm-up": manifest(warmup={"timeout": "1m"}, rollout={"progressDeadline": "61s"}),
    "a hub": source(huggingFace={"repository": "org/name"}),
    "an image": source(image={"reference": "registry.example.com/model:1"}),
    "a cache of a hub": manifest(
        model={"source": {"huggingFace": {"repository": "org/name"}}, "cache": {"size": "1Ti"}}, replicas=3
    ),
    "a cache on one node": manifest(
        model={"source": {"image": {"reference": "m:1"}}, "cache": {"size": "9", "accessMode": "ReadWriteOnce"}},
        replicas=1,
    ),
    "a cache of what is quantized": manifest(
        model={"source": {"local": LOCAL}, "cache": {"size": "1Gi"}},
        quantization={
            "method": "AWQ",
            "calibration": {"configMapRef": {"name": "c", "key": "k"}},
            "qualityGate": {"dataset": {"persistentVolumeClaim": {"claimName": "c", "path": "h.jsonl"}}},
        },
    ),
    "a gate of what is quantized already": manifest(
        quantization={"qualityGate": {"base": {"local": LOCAL}, "dataset": {"configMapRef": {"name": "c", "key": "k"}}}}
    ),
    "a cache of a tuned draft": tuned(dataset=DATASET, generalDataset=DATASET, steps=1),
    "short answers": tuned(dataset=DATASET, sequenceTokens=128, maxAnswerTokens=127),
    "a claim": source(persistentVolumeClaim={"claimName": "models"}),
    "a draft": manifest(speculation={"method": "DraftModel", "draftModel": {"source": {"local": LOCAL}}}),
    "a draft by rejection sampling": manifest(
        speculation={"acceptance": "Distribution", "draftModel": {"source": {"local": LOCAL}}}
    ),
    "latencies": manifest(objectives={"ttft": {"p95": "1s500ms"}, "itl": {"p95": "1ms"}}),
    "one replica always": manifest(autoscaling={"minReplicas": 1, "maxReplicas": 1}),
    "idle to zero": manifest(autoscaling={"minReplicas": 0, "maxReplicas": 4, "provider": "KEDA"}),
    "by both readings": manifest(
        autoscaling={
            "maxReplicas": 2,
            "metrics": [{"type": "KVCacheUsage", "target": 100}, {"type": "RequestsWaiting", "target": 101}],
            "scaleDownStabilization": "1h",
        }
    ),
    "a monitor's label": manifest(monitoring={"labels": {"release": "prometheus"}}),
    "mixed units": manifest(warmup={"timeout": "1h30m5s"}),
    "prefixed label": metadata(labels={"example.com/team": "a", "team": ""}),
    "like a reserved prefix": metadata(labels={"millstream.devs/x": "a"}, annotations={"app.kubernetes.io/x": "a"}),
    "every taint": toleration(operator="Exists"),
    "a key, any effect": toleration(key="spot"),
    "for a while": toleration(key="spot", effect="NoExecute", tolerationSeconds=0),
    "empty value": env(name="B", value=""),
    "from a secret": env(name="B", valueFrom=SECRET),
    "from a config map": env(name="B", valueFrom=CONFIG),
    "like a reserved variable": env(name="MY_MILLSTREAM_X", value="1"),
}

# name: (manifest, path of the violation, a part of its message)
REQUIRED, PREFERRED = (f"{how}DuringSchedulingIgnoredDuringExecution" for how in ("required", "preferred"))
AFFINITY_PATH = "spec.podTemplate.spec.affinity"


def in_affinity(path: str, value: Any) -> Manifest:
    """`a.b[].c` -> a manifest with the value there, in lists of one."""
    for step in reversed(path.split(".")):
        value = {step.removesuffix("[]"): [value] if step.endswith("[]") else value}
    return pod_spec(affinity=value)


def affinity_cases() -> dict[str, tuple[Manifest, str, str]]:
    """Operators without their values, at each place where the API has them."""
    node = (f"nodeAffinity.{REQUIRED}.nodeSelectorTerms[]", f"nodeAffinity.{PREFERRED}[].preference")
    pods = (f"podAffinity.{REQUIRED}[].labelSelector", f"podAntiAffinity.{REQUIRED}[].namespaceSelector")
    wrong: dict[str, Manifest] = {
        "operators In and NotIn need": {"key": "zone", "operator": "NotIn"},
        "Exists and DoesNotExist take no": {"key": "zone", "operator": "DoesNotExist", "values": ["a"]},
    }
    numbers: dict[str, Manifest] = {
        "one whole number": {"key": "cores", "operator": "Gt", "values": ["1.5"]},
        "Gt and Lt need one": {"key": "cores", "operator": "Lt", "values": ["1", "2"]},
    }
    found = {}
    for place in (*node, *pods):
        for words, expression in (wrong | (numbers if place in node else {})).items():
            path = f"{place}.matchExpressions[]"
            stored = in_affinity(path, expression)
            if place in pods:
                kind = place.partition(".")[0]
                stored["spec"]["podTemplate"]["spec"]["affinity"][kind][REQUIRED][0]["topologyKey"] = "zone"
            elif PREFERRED in place:
                stored["spec"]["podTemplate"]["spec"]["affinity"]["nodeAffinity"][PREFERRED][0]["weight"] = 1
            found[f"{words} at {place}"] = stored, f"{AFFINITY_PATH}.{path.replace('[]', '[0]')}", words
    return found


BAD: dict[str, tuple[Manifest, str, str]] = {
    **affinity_cases(),
    "name of 53": (manifest("d" * 53), "", "52 characters"),
    "name with a digit first": (manifest("1d"), "", "starts with a letter"),
    "name with a dot": (manifest("a.b"), "", "DNS label"),
    "name that ends with a dash": (manifest("a-"), "", "DNS label"),
    "name in capitals": (manifest("Demo"), "", "DNS label"),
    "no source": (source(), "spec.model.source", "exactly one"),
    "two sources": (source(local=LOCAL, image={"reference": "m:1"}), "spec.model.source", "exactly one"),
    "an image that nobody pulls": (
        source(image={"reference": "m:1", "pullPolicy": "Never"}),
        "spec.model.source.image.pullPolicy",
        "use IfNotPresent",
    ),
    "a cache of what is there": (
        manifest(model={"source": {"local": LOCAL}, "cache": {"size": "1Gi"}}),
        "spec",
        "huggingFace or image",
    ),
    "quantized into nothing": (
        manifest(quantization={"method": "AWQ", "calibration": DATASET}),
        "spec",
        "calibration needs model.cache",
    ),
    "quantized by no method": (made(calibration=DATASET), "spec.quantization", "calibration needs method"),
    "quantized to nothing": (
        made(method="None", calibration=DATASET),
        "spec.quantization",
        "calibration needs method",
    ),
    "calibrated with nothing": (
        made(method="AWQ", calibration={}),
        "spec.quantization.calibration",
        "exactly one source",
    ),
    "judged by nothing": (
        manifest(quantization={"qualityGate": {"dataset": {}, "base": {"local": LOCAL}}}),
        "spec.quantization.qualityGate.dataset",
        "exactly one source",
    ),
    "compared with nothing": (
        manifest(quantization={"qualityGate": {"dataset": DATASET}}),
        "spec.quantization",
        "one of calibration and qualityGate.base",
    ),
    "compared with two": (
        made(method="AWQ", calibration=DATASET, qualityGate={"dataset": DATASET, "base": {"local": LOCAL}}),
        "spec.quantization",
        "one of calibration and qualityGate.base",
    ),
    "a base from nowhere": (
        manifest(quantization={"qualityGate": {"dataset": DATASET, "base": {}}}),
        "spec.quantization.qualityGate.base",
        "exactly one",
    ),
    "a base that is always pulled": (
        manifest(
            quantization={
                "qualityGate": {
                    "dataset": DATASET,
                    "base": {"image": {"reference": "m:1", "pullPolicy": "Always"}},
                }
            }
        ),
        "spec.quantization.qualityGate.base.image",
        "takes no pullPolicy",
    ),
    "a cache that two nodes cannot mount": (
        manifest(
            model={
                "source": {"huggingFace": {"repository": "org/name"}},
                "cache": {"size": "1Gi", "accessMode": "ReadWriteOncePod"},
            },
            replicas=2,
        ),
        "spec",
        "must be ReadWriteMany",
    ),
    "tuned into nothing": (
        manifest(speculation={"draftModel": {"source": {"local": LOCAL}}, "tuning": {"dataset": DATASET}}),
        "spec",
        "tuning needs model.cache",
    ),
    "no draft to tune": (
        manifest(
            model={"source": {"local": LOCAL}, "cache": {"size": "1Gi"}}, speculation={"tuning": {"dataset": DATASET}}
        ),
        "spec.speculation",
        "name one as draftModel",
    ),
    "tuned in a volume of one pod": (
        tuned({"accessMode": "ReadWriteOncePod"}, dataset=DATASET),
        "spec",
        "while pods read from it",
    ),
    "tuned with nothing": (tuned(dataset={}), "spec.speculation.tuning.dataset", "exactly one source"),
    "tuned with two generals": (
        tuned(dataset=DATASET, generalDataset=DATASET | {"persistentVolumeClaim": {"claimName": "c", "path": "p"}}),
        "spec.speculation.tuning.generalDataset",
        "exactly one source",
    ),
    "answers without a prompt": (
        tuned(dataset=DATASET, sequenceTokens=256),
        "spec.speculation.tuning",
        "must be less than sequenceTokens",
    ),
    "a draft from nowhere": (
        manifest(speculation={"draftModel": {"source": {}}}),
        "spec.speculation.draftModel.source",
        "exactly one",
    ),
    "a draft model that is not named": (
        manifest(speculation={"method": "DraftModel"}),
        "spec.speculation",
        "needs draftModel",
    ),
    "n-grams with a draft": (
        manifest(speculation={"method": "NGram", "draftModel": {"source": {"local": LOCAL}}}),
        "spec.speculation",
        "take no draftModel",
    ),
    "no drafts, four of them": (
        manifest(speculation={"method": "Disabled", "maxDraftTokens": 4}),
        "spec.speculation",
        "takes no maxDraftTokens",
    ),
    "no drafts, and what governs them": (
        manifest(speculation={"method": "Disabled", "governor": {"mode": "Observe"}}),
        "spec.speculation",
        "takes no governor",
    ),
    "rejection sampling of n-grams": (
        manifest(speculation={"method": "NGram", "acceptance": "Distribution"}),
        "spec.speculation",
        "acceptance Distribution needs draftModel",
    ),
    "GPUs of a CPU": (manifest(parallelism={"tensor": 2}), "spec", "are about GPUs"),
    "at once": (manifest(objectives={"ttft": {"p95": "0ms"}}), "spec.objectives.ttft.p95", "from 1ms"),
    "tomorrow": (manifest(objectives={"itl": {"p95": "2h"}}), "spec.objectives.itl.p95", "to 1h"),
    "fewer tokens than sequences": (
        manifest(engine={"maxNumBatchedTokens": 63, "maxNumSeqs": 64}),
        "spec.engine",
        "at least maxNumSeqs",
    ),
    "dtype on a GPU": (manifest(accelerator={"type": "GPU"}, engine={"dtype": "float32"}), "spec", "type CPU"),
    "dtype, accelerator left open": (manifest(accelerator={}, engine={"dtype": "auto"}), "spec", "type CPU"),
    "GPU memory on a CPU": (manifest(engine={"gpuMemoryUtilizationPercent": 50}), "spec", "needs accelerator.type GPU"),
    "heartbeat of two days": (manifest(warmup={"heartbeatInterval": "48h"}), "spec.warmup.heartbeatInterval", "24h"),
    "no time to warm up": (manifest(warmup={"timeout": "0s"}), "spec.warmup.timeout", "from 1s"),
    "a day and a second": (manifest(warmup={"timeout": "24h1s"}), "spec.warmup.timeout", "to 24h"),
    "no time to drain": (manifest(rollout={"drainTimeout": "0s"}), "spec.rollout.drainTimeout", "from 1s"),
    "no wait for evidence": (manifest(rollout={"evidenceTimeout": "1s"}), "spec.rollout.evidenceTimeout", "from 10s"),
    "no deadline": (manifest(rollout={"progressDeadline": "0s"}), "spec.rollout.progressDeadline", "from 1s"),
    "deadline of three days": (manifest(rollout={"progressDeadline": "72h"}), "spec.rollout.progressDeadline", "48h"),
    "deadline at the default warm-up": (manifest(rollout={"progressDeadline": "20m"}), "spec", "warmup.timeout (20m"),
    "deadline below the warm-up": (
        manifest(warmup={"timeout": "1h"}, rollout={"progressDeadline": "59m"}),
        "spec",
        "longer than warmup.timeout",
    ),
    "keys that are not named": (manifest(auth={"mode": "Enabled"}), "spec.auth", "needs apiKeysSecretRef"),
    "keys that are not asked for": (
        manifest(auth={"mode": "Disabled", "apiKeysSecretRef": {"name": "n", "key": "k"}}),
        "spec.auth",
        "takes no apiKeysSecretRef",
    ),
    "a policy that is not there": (
        manifest(network={"mode": "Disabled", "ingress": [{"podSelector": {}}]}),
        "spec.network",
        "neither ingress nor egress",
    ),
    "no peer": (manifest(network={"ingress": [{}]}), "spec.network.ingress[0]", "either ipBlock"),
    "pods at an address": (
        manifest(network={"egress": [{"to": [{"podSelector": {}, "ipBlock": {"cidr": "192.0.2.0/24"}}]}]}),
        "spec.network.egress[0].to[0]",
        "either ipBlock",
    ),
    "the metadata service": (
        manifest(network={"egress": [{"to": [{"ipBlock": {"cidr": "169.254.169.254/32"}}]}]}),
        "spec.network.egress[0].to[0].ipBlock",
        "link-local",
    ),
    "ports backwards": (
        manifest(network={"egress": [{"to": [{"podSelector": {}}], "ports": [{"port": 2, "endPort": 1}]}]}),
        "spec.network.egress[0].ports[0]",
        "at least port",
    ),
    "more at least than at most": (
        manifest(autoscaling={"minReplicas": 3, "maxReplicas": 2}),
        "spec.autoscaling",
        "at most maxReplicas",
    ),
    "zero without KEDA": (
        manifest(autoscaling={"minReplicas": 0, "maxReplicas": 2, "provider": "HPA"}),
        "spec.autoscaling",
        "needs KEDA",
    ),
    "one reading twice": (
        manifest(
            autoscaling={
                "maxReplicas": 2,
                "metrics": [{"type": "RequestsWaiting", "target": 1}, {"type": "RequestsWaiting", "target": 2}],
            }
        ),
        "spec.autoscaling.metrics",
        "once",
    ),
    "fuller than full": (
        manifest(autoscaling={"maxReplicas": 2, "metrics": [{"type": "KVCacheUsage", "target": 101}]}),
        "spec.autoscaling.metrics[0]",
        "percentage",
    ),
    "two hours of patience": (
        manifest(autoscaling={"maxReplicas": 2, "scaleDownStabilization": "2h"}),
        "spec.autoscaling.scaleDownStabilization",
        "to 1h",
    ),
    "our label on a monitor": (
        manifest(monitoring={"labels": {"app.kubernetes.io/name": "x"}}),
        "spec.monitoring.labels",
        "the operator's own",
    ),
    "our label": (
        metadata(labels={"millstream.dev/deployment": "x"}),
        "spec.podTemplate.metadata.labels",
        "the operator's own",
    ),
    "a common label": (
        metadata(labels={"app.kubernetes.io/name": "x"}),
        "spec.podTemplate.metadata.labels",
        "the operator's own",
    ),
    "the gateway's label": (metadata(labels={"llm-d.ai/role": "x"}), "spec.podTemplate.metadata.labels", "own"),
    "our annotation": (
        metadata(annotations={"millstream.dev/applied": "x"}),
        "spec.podTemplate.metadata.annotations",
        "the operator's own",
    ),
    "the scraper's annotation": (
        metadata(annotations={"prometheus.io/port": "1"}),
        "spec.podTemplate.metadata.annotations",
        "the operator's own",
    ),
    "Exists with a value": (
        toleration(key="spot", operator="Exists", value="x"),
        "spec.podTemplate.spec.tolerations[0]",
        "takes no value",
    ),
    "Equal without a key": (
        toleration(operator="Equal", value="x"),
        "spec.podTemplate.spec.tolerations[0]",
        "needs a key",
    ),
    "nothing": (toleration(), "spec.podTemplate.spec.tolerations[0]", "needs a key"),
    "seconds without an effect": (
        toleration(key="spot", tolerationSeconds=1),
        "spec.podTemplate.spec.tolerations[0]",
        "NoExecute",
    ),
    "seconds with another effect": (
        toleration(key="spot", effect="NoSchedule", tolerationSeconds=1),
        "spec.podTemplate.spec.tolerations[0]",
        "NoExecute",
    ),
    "our variable": (
        env(name="MILLSTREAM_X", value="1"),
        "spec.podTemplate.spec.containers[0].env[1]",
        "the operator's own",
    ),
    "no value": (env(name="B"), "spec.podTemplate.spec.containers[0].env[1]", "exactly one of value"),
    "two values": (
        env(name="B", value="1", valueFrom=SECRET),
        "spec.podTemplate.spec.containers[0].env[1]",
        "exactly one of value",
    ),
    "from nowhere": (
        env(name="B", valueFrom={}),
        "spec.podTemplate.spec.containers[0].env[1].valueFrom",
        "exactly one of secretKeyRef",
    ),
    "from two places": (
        env(name="B", valueFrom=SECRET | CONFIG),
        "spec.podTemplate.spec.containers[0].env[1].valueFrom",
        "exactly one of secretKeyRef",
    ),
}
# What Pydantic's own patterns refuse first; CEL needs the rule because a CRD bounds no keys.
KEYS_ONLY_IN_CEL: dict[str, tuple[Manifest, str]] = {
    "label key": (metadata(labels={"a b": "x"}), "spec.podTemplate.metadata.labels"),
    "annotation key": (metadata(annotations={"a/b/c": "x"}), "spec.podTemplate.metadata.annotations"),
    "long key": (metadata(annotations={"a" * 318: "x"}), "spec.podTemplate.metadata.annotations"),
    "monitor label": (manifest(monitoring={"labels": {"a b": "x"}}), "spec.monitoring.labels"),
    "node label": (pod_spec(nodeSelector={"-a": "x"}), "spec.podTemplate.spec.nodeSelector"),
}


def cel_violations(stored: Manifest) -> list[tuple[str, str]]:
    """What the API server would say: (path, message) of every rule that does not hold."""
    return [
        (path, rule.message)
        for rule in RULES
        for path, value in values(stored, rule.path.split(".") if rule.path else [])
        if not evaluate(rule.cel, value)
    ]


def values(value: Any, steps: list[str], path: str = "") -> list[tuple[str, Any]]:
    if not steps:
        return [(path, value)]
    name = steps[0].removesuffix("[]")
    if name not in value:
        return []
    here = f"{path}.{name}" if path else name
    if not steps[0].endswith("[]"):
        return values(value[name], steps[1:], here)
    return [found for i, item in enumerate(value[name]) for found in values(item, steps[1:], f"{here}[{i}]")]


def python_violations(stored: Manifest) -> list[tuple[str, str]]:
    deployment = LLMDeployment.model_validate_json(json.dumps(stored))
    return [(violation.path, violation.message) for violation in violations(deployment)]


@pytest.mark.parametrize("name", GOOD)
def test_a_good_object_breaks_no_rule_on_either_side(name: str) -> None:
    assert cel_violations(GOOD[name]) == []
    assert python_violations(GOOD[name]) == []


@pytest.mark.parametrize("name", BAD)
def test_a_bad_object_breaks_the_same_rules_on_both_sides(name: str) -> None:
    stored, path, said = BAD[name]
    found = python_violations(stored)
    assert found == cel_violations(stored)
    assert found[0][0] == path
    assert said in found[0][1]


@pytest.mark.parametrize("name", KEYS_ONLY_IN_CEL)
def test_the_server_refuses_keys_that_only_cel_can_bound(name: str) -> None:
    stored, path = KEYS_ONLY_IN_CEL[name]
    assert path in [where for where, _ in cel_violations(stored)]


def identified(rule: Rule) -> str:
    return f"{rule.path}: {rule.cel[:60]}"


def test_every_rule_is_broken_by_some_case() -> None:
    """A rule that nothing here breaks could be written wrongly in either language."""
    broken = {message for stored, _, _ in BAD.values() for message in python_violations(stored)}
    broken |= {found for stored, _ in KEYS_ONLY_IN_CEL.values() for found in cel_violations(stored)}
    messages = {message for _, message in broken}
    assert not [identified(rule) for rule in RULES if rule.message not in messages]


def test_no_rule_speaks_beyond_the_evaluator() -> None:
    """Reads each rule to its end: an expression outside the subset raises."""
    for rule in RULES:
        for stored in GOOD.values():
            for _, value in values(stored, rule.path.split(".") if rule.path else []):
                assert evaluate(rule.cel, value) is True, identified(rule)
