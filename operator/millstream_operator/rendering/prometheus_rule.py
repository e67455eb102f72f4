"""The PrometheusRule that carries an LLMDeployment's alerts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.rendering.alerts import alerts
from millstream_operator.rendering.names import child


def prometheus_rule(owner: LLMDeployment, labels: Mapping[str, str]) -> dict[str, Any]:
    """`labels` are added to its own, for a Prometheus that selects by them."""
    made = child(owner, "monitoring.coreos.com/v1", "PrometheusRule")
    made["metadata"]["labels"] = {**labels, **made["metadata"]["labels"]}
    rules = [alert.as_rule(owner) for alert in alerts(owner)]
    return made | {"spec": {"groups": [{"name": f"millstream.{owner.name}", "rules": rules}]}}
