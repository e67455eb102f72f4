"""KEDA's ScaledObject on Prometheus. Checked against KEDA 2.21's executor and its prometheus scaler.

Three details matter:

- An empty answer counts as 0 by KEDA's default, so a Prometheus that no longer scrapes would shrink a busy model. Here
  it is an error, at which KEDA leaves the replicas alone. Only at 0 replicas is an empty
  answer correct; then it counts as 0, or KEDA would not even scale up to its own minimum.
- A model is *active* for KEDA while a trigger is above 0. A queue is empty most of the time, so with a minimum of 0 a
  separate trigger counts all traffic; otherwise a busy model without a queue would be stopped.
- KEDA's admission refuses a ScaledObject while a HorizontalPodAutoscaler has the same target, so ours is deleted first.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.scaling import Autoscaling, ScalingMetric, ScalingMetricType
from millstream_operator.rendering.names import child
from millstream_operator.rendering.queries import (
    KV_CACHE_USAGE,
    REQUESTS_FINISHED,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    series,
    total,
)
from millstream_operator.rendering.scaling_policy import behavior, metrics, min_replicas, stabilization_seconds

# The trigger for activity must never ask for a second replica.
NEVER_REACHED = 1_000_000_000
# Shorter than this, a request between two scrapes and two looks of KEDA would not be seen.
SHORTEST_WINDOW_SECONDS = 120


def scaled_object(owner: LLMDeployment, wanted: Autoscaling, prometheus_url: str) -> dict[str, Any]:
    lowest = min_replicas(wanted)
    queries = [_capacity(owner, one) for one in metrics(wanted)]
    if lowest == 0:
        queries.append((_activity(owner, stabilization_seconds(wanted)), NEVER_REACHED))
    empty_is_zero = str(owner.spec.replicas == 0).lower()
    return child(owner, "keda.sh/v1alpha1", "ScaledObject") | {
        "spec": {
            "scaleTargetRef": {"apiVersion": owner.api_version, "kind": owner.kind, "name": owner.name},
            "minReplicaCount": lowest,
            "maxReplicaCount": wanted.max_replicas,
            "cooldownPeriod": stabilization_seconds(wanted),
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior(wanted)}},
            "triggers": [
                {
                    "type": "prometheus",
                    "metadata": {
                        "serverAddress": prometheus_url,
                        "query": query,
                        "threshold": str(threshold),
                        "ignoreNullValues": empty_is_zero,
                    },
                }
                for query, threshold in queries
            ],
        }
    }


def _capacity(owner: LLMDeployment, metric: ScalingMetric) -> tuple[str, int]:
    """(query, threshold): KEDA wants query / threshold replicas, so the query is a sum over the pods."""
    if metric.type is ScalingMetricType.KV_CACHE_USAGE:
        return f"100 * {total(series(owner, KV_CACHE_USAGE))}", metric.target
    return total(series(owner, REQUESTS_WAITING)), metric.target


def _activity(owner: LLMDeployment, seconds: int) -> str:
    """Count requests that run, wait, or finished within the window; warm-up and heartbeats do not count."""
    window = f"{max(SHORTEST_WINDOW_SECONDS, seconds)}s"
    finished = f"increase({series(owner, REQUESTS_FINISHED, window)})"
    parts = (
        total(series(owner, REQUESTS_RUNNING)),
        total(series(owner, REQUESTS_WAITING)),
        f"sum(max by (pod, finished_reason) ({finished}))",
    )
    return " + ".join(parts)
