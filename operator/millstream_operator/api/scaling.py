"""How many replicas there may be, and by what they are counted.

An autoscaler writes `spec.replicas` through the LLMDeployment's own /scale, and the operator copies it down. So the
operator never writes a spec, and what a person scales by hand and what an autoscaler scales is one number.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from millstream_operator.api.base import ApiModel, Duration


class ScalingMetricType(StrEnum):
    REQUESTS_WAITING = "RequestsWaiting"
    KV_CACHE_USAGE = "KVCacheUsage"


class ScalingMetric(ApiModel):
    """One reading of the replicas; with several, the one that asks for the most replicas wins."""

    type: ScalingMetricType = Field(
        description="RequestsWaiting: requests that wait for a place in the batch. KVCacheUsage: share of the KV cache "
        "that requests hold."
    )
    target: int = Field(
        ge=1,
        le=100_000,
        description="The mean of a replica that is aimed at: requests, for example 4, or percent, for example 80.",
    )


class AutoscalerProvider(StrEnum):
    AUTO = "Auto"
    HPA = "HPA"
    KEDA = "KEDA"


class Autoscaling(ApiModel):
    """Replicas by load. It writes spec.replicas, so leave that one out of your manifests."""

    min_replicas: int | None = Field(
        None,
        ge=0,
        le=1000,
        description="Replicas at least. 0 stops an idle model; that needs KEDA, and a request does not wake it. "
        "Default: 1.",
    )
    max_replicas: int = Field(ge=1, le=1000, description="Replicas at most.")
    metrics: (
        Annotated[
            list[ScalingMetric],
            Field(
                min_length=1,
                max_length=2,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
            ),
        ]
        | None
    ) = Field(
        None,
        description="What the replicas are counted by. Default: RequestsWaiting 4, so that a queue brings replicas, "
        "and KVCacheUsage 80, so that busy ones stay.",
    )
    scale_down_stabilization: Duration | None = Field(
        None,
        description="Time for which fewer replicas must have been enough before one leaves, for example 5m. Default: "
        "5m.",
    )
    provider: AutoscalerProvider | None = Field(
        None,
        description="HPA: a HorizontalPodAutoscaler, which needs a custom-metrics adapter. KEDA: a ScaledObject on "
        "Prometheus. Auto: KEDA where the cluster has it and the chart's monitoring.prometheusURL is set, else HPA. "
        "Default: Auto.",
    )
