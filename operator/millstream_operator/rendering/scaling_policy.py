"""The policy that both autoscalers share: targets, and the speed of scaling down."""

from __future__ import annotations

from typing import Any

from millstream_operator.api import duration
from millstream_operator.api.scaling import Autoscaling, ScalingMetric, ScalingMetricType

DEFAULT_MIN_REPLICAS = 1
DEFAULT_STABILIZATION = "5m"
DEFAULT_METRICS = (
    ScalingMetric(type=ScalingMetricType.REQUESTS_WAITING, target=4),
    ScalingMetric(type=ScalingMetricType.KV_CACHE_USAGE, target=80),
)
# What autoscaling/v2 takes as a policy's period.
SHORTEST_PERIOD_SECONDS, LONGEST_PERIOD_SECONDS = 60, 1800


def min_replicas(wanted: Autoscaling) -> int:
    return DEFAULT_MIN_REPLICAS if wanted.min_replicas is None else wanted.min_replicas


def metrics(wanted: Autoscaling) -> tuple[ScalingMetric, ...]:
    return tuple(wanted.metrics or DEFAULT_METRICS)


def stabilization_seconds(wanted: Autoscaling) -> int:
    return duration.seconds(wanted.scale_down_stabilization or DEFAULT_STABILIZATION)


def behavior(wanted: Autoscaling) -> dict[str, Any]:
    """Return the `behavior` of autoscaling/v2: remove one replica at a time.

    An empty queue asks for no replicas at all, however busy the batches are. So a deployment must not fall from eight
    replicas to one at the end of a quiet window: one is removed, the load of the others shows, then the next may go.
    """
    seconds = stabilization_seconds(wanted)
    period = min(LONGEST_PERIOD_SECONDS, max(SHORTEST_PERIOD_SECONDS, seconds))
    return {
        "scaleDown": {
            "stabilizationWindowSeconds": seconds,
            "selectPolicy": "Max",
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": period}],
        }
    }


def in_words(wanted: Autoscaling) -> str:
    """`1 to 8 replicas by RequestsWaiting 4, KVCacheUsage 80 %`."""
    unit = {ScalingMetricType.KV_CACHE_USAGE: " %"}
    targets = ", ".join(f"{one.type} {one.target}{unit.get(one.type, '')}" for one in metrics(wanted))
    return f"{min_replicas(wanted)} to {wanted.max_replicas} replicas by {targets}"
