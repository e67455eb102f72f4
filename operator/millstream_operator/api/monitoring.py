"""Settings for the Prometheus operator, where a cluster has one."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from millstream_operator.api.base import ApiModel, LabelValue, QualifiedName


class MonitoringMode(StrEnum):
    AUTO = "Auto"
    DISABLED = "Disabled"


class Monitoring(ApiModel):
    """A PodMonitor and a PrometheusRule with alerts, while the cluster serves these kinds."""

    mode: MonitoringMode | None = Field(
        None, description="Auto makes them where the Prometheus operator is installed; Disabled never. Default: Auto."
    )
    labels: Annotated[dict[QualifiedName, LabelValue], Field(max_length=16)] | None = Field(
        None,
        description="Labels of both, for a Prometheus that selects by them, over the chart's monitoring.labels.",
    )
