"""LLMDeployments for tests: the smallest one, and one in which every field of the API is set."""

from __future__ import annotations

import copy
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import parse

Manifest = dict[str, Any]
NAMESPACE = "team"
UID = "5f0c3a52-0000-4000-8000-000000000001"


def manifest(name: str = "demo", **spec: Any) -> Manifest:
    """The smallest LLMDeployment, as the API server stores it; `spec` replaces whole fields of its spec."""
    return {
        "apiVersion": "millstream.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": UID, "generation": 1, "resourceVersion": "1"},
        "spec": {"model": {"source": {"local": {"path": "demo-chat"}}}, "accelerator": {"type": "CPU"}} | spec,
    }


def deployment(name: str = "demo", **spec: Any) -> LLMDeployment:
    """As `manifest`, read and checked."""
    return parse(manifest(name, **spec))


_POD_TERM: dict[str, Any] = {
    "labelSelector": {
        "matchLabels": {"app": "batch"},
        "matchExpressions": [{"key": "tier", "operator": "In", "values": ["low"]}],
    },
    "namespaces": ["batch"],
    "namespaceSelector": {
        "matchLabels": {"team": "batch"},
        "matchExpressions": [{"key": "stage", "operator": "In", "values": ["test"]}],
    },
    "topologyKey": "kubernetes.io/hostname",
}
_POD_AFFINITY: dict[str, Any] = {
    "requiredDuringSchedulingIgnoredDuringExecution": [_POD_TERM],
    "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 10, "podAffinityTerm": _POD_TERM}],
}
_AFFINITY: dict[str, Any] = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
        },
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 20, "preference": {"matchExpressions": [{"key": "rack", "operator": "In", "values": ["1"]}]}}
        ],
    },
    "podAffinity": _POD_AFFINITY,
    "podAntiAffinity": _POD_AFFINITY,
}

# Every value differs from its default, so that leaving a field out changes something too.
_FULL_SPEC: dict[str, Any] = {
    "tier": "Startup",
    "workload": {"profile": "Chat"},
    "model": {"servedName": "chat", "source": {"local": {"path": "demo-chat"}}},
    "accelerator": {"type": "GPU", "products": ["A100-80GB"]},
    "engine": {
        "maxModelLen": 4096,
        "maxNumBatchedTokens": 1024,
        "maxNumSeqs": 16,
        "gpuMemoryUtilizationPercent": 80,
        "prefixCaching": "Disabled",
        "hybridKvCacheManager": "Enabled",
    },
    "warmup": {"heartbeatInterval": "45s", "timeout": "15m"},
    "rollout": {
        "strategy": "ResourceAware",
        "progressDeadline": "40m",
        "drainTimeout": "5m",
        "evidenceTimeout": "1h",
        "onInsufficientEvidence": "Hold",
        "retry": "1",
    },
    "replicas": 2,
    "autoscaling": {
        "minReplicas": 2,
        "maxReplicas": 5,
        "metrics": [{"type": "RequestsWaiting", "target": 6}],
        "scaleDownStabilization": "10m",
        "provider": "HPA",
    },
    "runtime": {"image": "registry.example.com/millstream-runtime:1.0", "logLevel": "Debug"},
    "service": {"type": "NodePort", "port": 8080, "allowedOrigins": ["https://chat.example.com"]},
    "auth": {"mode": "Enabled", "apiKeysSecretRef": {"name": "api-keys", "key": "keys"}},
    "network": {
        "mode": "Managed",
        "ingress": [
            {"namespaceSelector": {"matchLabels": {"team": "search"}}, "podSelector": {"matchLabels": {"app": "web"}}},
            {"ipBlock": {"cidr": "192.0.2.0/24", "except": ["192.0.2.8/29"]}},
        ],
        "egress": [
            {
                "to": [
                    {
                        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "telemetry"}},
                        "podSelector": {"matchLabels": {"app": "collector"}},
                    },
                    {"ipBlock": {"cidr": "198.51.100.0/24", "except": ["198.51.100.8/29"]}},
                ],
                "ports": [{"port": 4317, "endPort": 4318, "protocol": "UDP"}],
            }
        ],
    },
    "monitoring": {"mode": "Auto", "labels": {"release": "prometheus"}},
    "podTemplate": {
        "metadata": {"labels": {"team": "search"}, "annotations": {"example.com/contact": "search@example.com"}},
        "spec": {
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [
                {
                    "key": "spot",
                    "operator": "Equal",
                    "value": "true",
                    "effect": "NoExecute",
                    "tolerationSeconds": 60,
                }
            ],
            "affinity": _AFFINITY,
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
            "imagePullSecrets": [{"name": "registry"}],
            "initContainers": [
                {
                    "name": "fetch-model",
                    "resources": {
                        "requests": {"cpu": "200m", "memory": "256Mi", "ephemeral-storage": "1Gi"},
                        "limits": {"cpu": "2", "memory": "1Gi", "ephemeral-storage": "4Gi"},
                    },
                }
            ],
            "containers": [
                {
                    "name": "runtime",
                    "env": [
                        {"name": "PLAIN", "value": "1"},
                        {
                            "name": "SECRET",
                            "valueFrom": {"secretKeyRef": {"name": "tokens", "key": "hub", "optional": True}},
                        },
                        {
                            "name": "CONFIG",
                            "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "mode", "optional": True}},
                        },
                    ],
                    "resources": {
                        "requests": {"cpu": "3", "memory": "6Gi", "ephemeral-storage": "1Gi"},
                        "limits": {"cpu": "5", "memory": "12Gi", "ephemeral-storage": "3Gi"},
                    },
                }
            ],
        },
    },
}


def full_manifest() -> Manifest:
    """A valid LLMDeployment that sets every field which exclude each other not, each to another value than its default.

    A copy: tests may change it.
    """
    return manifest(**copy.deepcopy(_FULL_SPEC))
