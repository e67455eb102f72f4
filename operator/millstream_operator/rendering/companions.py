"""Render a model's companions: its autoscaler and its monitors. Pure.

None of them is needed to serve, and most of them depend on what else the cluster has. So they are separate from the
objects that run the model, and a problem with them never makes a model unready.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.monitoring import Monitoring, MonitoringMode
from millstream_operator.api.scaling import AutoscalerProvider
from millstream_operator.rendering.horizontal_pod_autoscaler import horizontal_pod_autoscaler
from millstream_operator.rendering.pod_monitor import pod_monitor
from millstream_operator.rendering.prometheus_rule import prometheus_rule
from millstream_operator.rendering.scaled_object import scaled_object
from millstream_operator.rendering.scaling_policy import min_replicas

SCALED_OBJECT, POD_MONITOR, PROMETHEUS_RULE = "ScaledObject", "PodMonitor", "PrometheusRule"


@dataclass(frozen=True, slots=True)
class CompanionDefaults:
    """The chart's settings for all companions. They reach no pod, so they are not pinned."""

    prometheus_url: str = ""  # where KEDA asks; empty: KEDA is not used
    monitoring_labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """The autoscaler, and why this kind was chosen; `chosen` is empty where the spec names the kind."""

    manifest: dict[str, Any]
    chosen: str = ""


@dataclass(frozen=True, slots=True)
class NoAutoscaler:
    """The wanted autoscaler is not possible in this cluster. `message` says what is missing and what to do."""

    message: str


def autoscaler(
    owner: LLMDeployment, served: Collection[str], defaults: CompanionDefaults
) -> Autoscaler | NoAutoscaler | None:
    """Return the autoscaler that a spec asks for, of the kinds that are served; None where it asks for none."""
    wanted = owner.spec.autoscaling
    if wanted is None:
        return None
    lacking = _keda_lacks(served, defaults)
    provider = wanted.provider or AutoscalerProvider.AUTO
    if provider is AutoscalerProvider.HPA:
        return Autoscaler(horizontal_pod_autoscaler(owner, wanted))
    if not lacking:
        chosen = "KEDA: the cluster has it, and monitoring.prometheusURL is set."
        automatic = provider is AutoscalerProvider.AUTO
        return Autoscaler(scaled_object(owner, wanted, defaults.prometheus_url), chosen if automatic else "")
    if provider is AutoscalerProvider.KEDA:
        return NoAutoscaler(f"autoscaling.provider KEDA cannot be had: {lacking}. Install it, or use provider HPA.")
    if min_replicas(wanted) == 0:
        return NoAutoscaler(
            f"autoscaling.minReplicas 0 needs KEDA: {lacking}. Install it, or set minReplicas to 1 or more."
        )
    return Autoscaler(horizontal_pod_autoscaler(owner, wanted), f"HorizontalPodAutoscaler: {lacking}.")


def _keda_lacks(served: Collection[str], defaults: CompanionDefaults) -> str:
    if SCALED_OBJECT not in served:
        return "the API server serves no ScaledObject (keda.sh/v1alpha1)"
    return "" if defaults.prometheus_url else "the chart's monitoring.prometheusURL is empty"


def is_monitored(owner: LLMDeployment) -> bool:
    return (owner.spec.monitoring or Monitoring()).mode is not MonitoringMode.DISABLED


def monitors(owner: LLMDeployment, served: Collection[str], defaults: CompanionDefaults) -> list[dict[str, Any]]:
    """Return the objects for the Prometheus operator, of the kinds that are served."""
    if not is_monitored(owner):
        return []
    labels = {**defaults.monitoring_labels, **((owner.spec.monitoring or Monitoring()).labels or {})}
    builders = {POD_MONITOR: pod_monitor, PROMETHEUS_RULE: prometheus_rule}
    return [build(owner, labels) for kind, build in builders.items() if kind in served]
