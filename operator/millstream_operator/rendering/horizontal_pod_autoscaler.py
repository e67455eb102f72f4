"""A HorizontalPodAutoscaler on the pods' own metrics, which a custom-metrics adapter provides.

It scales the LLMDeployment through /scale, never the Deployment, whose replicas the operator resets at once. The
metrics have the runtime's names, as the Prometheus adapter passes them on by default; docs/autoscaling.md has its rule.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.quantity import canonical
from millstream_operator.api.scaling import Autoscaling, ScalingMetric, ScalingMetricType
from millstream_operator.rendering.names import child
from millstream_operator.rendering.queries import KV_CACHE_USAGE, REQUESTS_WAITING
from millstream_operator.rendering.scaling_policy import behavior, metrics, min_replicas


def horizontal_pod_autoscaler(owner: LLMDeployment, wanted: Autoscaling) -> dict[str, Any]:
    """`wanted` keeps at least one replica: an HPA goes no lower."""
    return child(owner, "autoscaling/v2", "HorizontalPodAutoscaler") | {
        "spec": {
            "scaleTargetRef": {"apiVersion": owner.api_version, "kind": owner.kind, "name": owner.name},
            "minReplicas": min_replicas(wanted),
            "maxReplicas": wanted.max_replicas,
            "metrics": [_metric(one) for one in metrics(wanted)],
            "behavior": behavior(wanted),
        }
    }


def _metric(metric: ScalingMetric) -> dict[str, Any]:
    name, target = REQUESTS_WAITING, str(metric.target)
    if metric.type is ScalingMetricType.KV_CACHE_USAGE:
        name, target = KV_CACHE_USAGE, canonical(f"{metric.target * 10}m")  # a share of 1, from percent
    value = {"type": "AverageValue", "averageValue": target}
    return {"type": "Pods", "pods": {"metric": {"name": name}, "target": value}}
