"""The links between the ranks of this replica, as `/ready` and `/metrics` show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from millstream_runtime.distributed.topology import Topology


def topology_json(topology: Topology | None) -> dict[str, Any] | None:
    """For `/ready`; None for one rank, or before the engine has loaded."""
    return None if topology is None else asdict(topology)


def topology_gauges(labels: Mapping[str, str], topology: Topology | None) -> Iterable[Metric]:
    """For `/metrics`; empty for one rank."""
    if topology is None:
        return
    values = (
        ("millstream_tensor_parallel_size", "Ranks that share every layer", float(topology.world_size)),
        (
            "millstream_allreduce_bytes_per_second",
            "Bus bandwidth of a large all-reduce, measured at start",
            topology.allreduce_bytes_per_second,
        ),
        (
            "millstream_allreduce_latency_seconds",
            "A small all-reduce, measured at start",
            topology.allreduce_latency_seconds,
        ),
    )
    for name, text, value in values:
        family = GaugeMetricFamily(name, text, labels=[*labels])
        family.add_metric([*labels.values()], value)
        yield family
    facts = {"backend": topology.backend, "link": topology.link, "peer_access": str(topology.peer_access).lower()}
    info = GaugeMetricFamily("millstream_topology_info", "What connects the ranks", labels=[*labels, *facts])
    info.add_metric([*labels.values(), *facts.values()], 1.0)
    yield info
