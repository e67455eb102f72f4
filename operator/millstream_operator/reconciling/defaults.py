"""What the operator's own configuration gives to new plans and renderings."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.rendering.companions import CompanionDefaults
from millstream_operator.rendering.network_policy import NetworkDefaults
from millstream_operator.rendering.pod_defaults import PodDefaults


@dataclass(frozen=True, slots=True)
class Defaults:
    """One part per consumer."""

    plan: PlanDefaults = field(default_factory=PlanDefaults)
    pods: PodDefaults = field(default_factory=PodDefaults)
    companions: CompanionDefaults = field(default_factory=CompanionDefaults)
    network: NetworkDefaults = field(default_factory=NetworkDefaults)
