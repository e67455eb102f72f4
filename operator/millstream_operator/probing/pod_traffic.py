"""What the pods of one revision answered, from `/metrics` at their own addresses.

A pod is read only if it belongs here by the uids of its owners and runs the configuration that was rendered
(`/ready`: config_hash). The text is untrusted: what is not a metric of ours is skipped.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from millstream_operator.kube.client import ClusterClient
from millstream_operator.kube.pod_access import PodAccess, PodUnreachable
from millstream_operator.probing.pod_owners import PodOwners
from millstream_operator.rendering.revision import Revision
from millstream_operator.workloads.traffic import Traffic

log = logging.getLogger(__name__)
Manifest = Mapping[str, Any]
TIMEOUT_SECONDS = 2.0
MAX_READ = 8  # pods of one revision
_SAMPLE = re.compile(r"vllm:(request_success_total|inter_token_latency_seconds_(?:sum|count))\{([^\n]*)\} (\S{1,32})")
_FINISHED = re.compile(r'finished_reason="(stop|length|error)"')
_LARGEST = float(1 << 53)


class TrafficReader:
    """For use within one event loop."""

    def __init__(self, access: PodAccess, client: ClusterClient) -> None:
        self._access, self._owners = access, PodOwners(client)

    async def read(self, workload: Manifest, pods: Sequence[Manifest], revision: Revision) -> dict[str, Traffic]:
        """Return the counters by the pod's uid; without the pods that cannot be read. Never raises.

        `workload`: the Deployment, which the caller knows to be the LLMDeployment's own. At most MAX_READ of `pods`
        are asked, by name.
        """
        asked = sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))[:MAX_READ]
        found = await asyncio.gather(*(self._read(workload, pod, revision) for pod in asked))
        uids = [str(pod["metadata"].get("uid", "")) for pod in asked]
        return {uid: one for uid, one in zip(uids, found, strict=True) if one is not None}

    async def _read(self, workload: Manifest, pod: Manifest, revision: Revision) -> Traffic | None:
        uid = workload["metadata"].get("uid")
        if uid is None or await self._owners.deployment_of(pod) != uid:
            return None
        try:
            ready = await self._access.ready(pod, TIMEOUT_SECONDS)
            if ready.get("config_hash") != revision.config_hash:
                return None
            return read_traffic(await self._access.metrics(pod, TIMEOUT_SECONDS))
        except PodUnreachable as reason:
            log.debug("%s: %s", pod["metadata"]["name"], reason)
            return None


def read_traffic(text: str) -> Traffic | None:
    """Return the counters of an exposition in Prometheus' text format; None where it has none of them."""
    counts: dict[str, float] = {}
    for line in text.splitlines():
        if (sample := _SAMPLE.fullmatch(line)) is None or (value := _number(sample[3])) is None:
            continue
        reason = _FINISHED.search(sample[2])
        name = sample[1] if sample[1] != "request_success_total" else (reason[1] if reason else None)
        if name is not None:
            counts[name] = counts.get(name, 0.0) + value
    if not counts:
        return None
    return Traffic(
        stop=int(counts.get("stop", 0)),
        length=int(counts.get("length", 0)),
        error=int(counts.get("error", 0)),
        intervals=int(counts.get("inter_token_latency_seconds_count", 0)),
        intervals_seconds=counts.get("inter_token_latency_seconds_sum", 0.0),
    )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 <= value <= _LARGEST else None
