"""What rendering takes from the operator's surroundings, besides the spec and the plan. None of it reaches a pod
template, so a change of it restarts nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream_operator.rendering.closed_addresses import ApiServer
from millstream_operator.rendering.network_policy import NetworkDefaults
from millstream_operator.rendering.probe_key_ring import ProbeKeyRing


@dataclass(frozen=True, slots=True)
class Surroundings:
    """As of now; it may be another one in the next turn."""

    probe_keys: ProbeKeyRing = field(default_factory=ProbeKeyRing)
    network: NetworkDefaults = field(default_factory=NetworkDefaults)
    operator_namespace: str = ""
    api_servers: tuple[ApiServer, ...] = ()
