"""What each replica of the operator says about itself, through the API server's pod proxy."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from e2e.release import Release


@dataclass(frozen=True, slots=True)
class Replica:
    """One pod's metrics; `writes` leaves the Lease's own out."""

    pod: str
    leading: bool
    writes: float


def replicas(release: Release) -> list[Replica]:
    """Those that answer; a pod that is starting or gone is left out."""
    found = []
    for pod in release.pods():
        name = pod["metadata"]["name"]
        path = f"/api/v1/namespaces/{release.namespace}/pods/{name}:8080/proxy/metrics"
        done = release.cluster.run("kubectl", "get", "--raw", path, check=False)
        if done.returncode == 0:
            found.append(_parsed(name, done.stdout))
    return found


def _parsed(pod: str, text: str) -> Replica:
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    leading = any(sample.name == "millstream_operator_leader" and sample.value == 1 for sample in samples)
    writes = sum(
        sample.value
        for sample in samples
        if sample.name == "millstream_operator_writes_total" and sample.labels["kind"] != "Lease"
    )
    return Replica(pod, leading, writes)
