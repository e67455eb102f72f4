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
from millstream_operator.workloads.traffic import Histogram, Traffic, histogram_of

log = logging.getLogger(__name__)
Manifest = Mapping[str, Any]
TIMEOUT_SECONDS = 2.0
MAX_READ = 8  # pods of one revision
_SAMPLE = re.compile(r"((?:vllm:|millstream_|process_)[a-z_]{1,60})(?:\{([^\n]*)\})? (\S{1,32})")
_FINISHED = re.compile(r'finished_reason="(stop|length|error)"')
_UPPER_BOUND = re.compile(r'(?:^|,)le="([0-9.e+-]{1,24}|\+Inf)"')
FINISHED, TOKEN_TIME_SUM = "vllm:request_success_total", "vllm:request_time_per_output_token_seconds_sum"
ENGINE_RESTARTS, STARTED = "millstream_engine_restarts_total", "process_start_time_seconds"
TOKEN_TIMES, PROMPT_TOKENS, MAX_TOKENS = BUCKETS = (
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_params_max_tokens_bucket",
)
MAX_BUCKETS = 64
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
    """Return the counters of an exposition in Prometheus' text format; None where no generation is counted."""
    counts: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {name: {} for name in BUCKETS}
    for line in text.splitlines():
        if (sample := _SAMPLE.fullmatch(line)) is None or (value := _number(sample[3])) is None:
            continue
        name, labels = sample[1], sample[2] or ""
        if name in buckets:
            if (bound := _UPPER_BOUND.search(labels)) is not None and (edge := _edge(bound[1])) is not None:
                buckets[name][edge] = buckets[name].get(edge, 0.0) + value
        elif name == FINISHED:
            if (reason := _FINISHED.search(labels)) is not None:
                counts[reason[1]] = counts.get(reason[1], 0.0) + value
        elif name in (TOKEN_TIME_SUM, ENGINE_RESTARTS, STARTED):
            counts[name] = counts.get(name, 0.0) + value
    if not counts.keys() & {"stop", "length", "error"}:
        return None
    histograms = {name: histogram_of(found.items()) for name, found in buckets.items() if len(found) <= MAX_BUCKETS}
    return Traffic(
        stop=int(counts.get("stop", 0)),
        length=int(counts.get("length", 0)),
        error=int(counts.get("error", 0)),
        token_times=histograms.get(TOKEN_TIMES, Histogram()),
        token_times_seconds=counts.get(TOKEN_TIME_SUM, 0.0),
        prompt_tokens=histograms.get(PROMPT_TOKENS, Histogram()),
        max_tokens=histograms.get(MAX_TOKENS, Histogram()),
        engine_restarts=int(counts.get(ENGINE_RESTARTS, 0)),
        started_at_seconds=counts.get(STARTED, 0.0),
    )


def _edge(text: str) -> float | None:
    return math.inf if text == "+Inf" else _number(text)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 <= value <= _LARGEST else None
