"""What a pod of this LLMDeployment measured: from the pod's own address, never through the Service.

Any program may answer behind a Service whose selector it meets. So a pod is asked only if it belongs here by label and
by the uids of its owners, and it counts only if it runs the configuration that was rendered:

    Pod -> ReplicaSet -> Deployment -> LLMDeployment        /ready: config_hash, memory, step_times
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from millstream_operator.diagnosis.pod_facts import parse_time
from millstream_operator.kube.client import ClusterClient
from millstream_operator.kube.pod_access import PodAccess, PodUnreachable
from millstream_operator.planning.measurement import PodMeasurement
from millstream_operator.probing.boot_report import read_boot_report
from millstream_operator.probing.pod_owners import PodOwners
from millstream_operator.rendering.revision import Revision

log = logging.getLogger(__name__)
Manifest = Mapping[str, Any]
TIMEOUT_SECONDS = 5.0
MAX_ASKED = 3  # pods of one LLMDeployment, until one answers


class PodMeasurer:
    """For use within one event loop."""

    def __init__(self, access: PodAccess, client: ClusterClient) -> None:
        self._access, self._owners = access, PodOwners(client)

    async def measure(self, workload: Manifest, pods: Sequence[Manifest], revision: Revision) -> PodMeasurement | None:
        """Ask the oldest of `pods` that are this Deployment's; None where none answers as the revision. Never raises.

        `workload`: the Deployment, which the caller knows to be the LLMDeployment's own.
        """
        uid = workload["metadata"].get("uid")
        oldest = sorted(pods, key=lambda pod: (_created_seconds(pod), pod["metadata"]["name"]))
        for pod in oldest[:MAX_ASKED]:
            if uid is not None and await self._owners.deployment_of(pod) == uid:
                found = await self._ask(pod, revision)
                if found is not None:
                    return found
        return None

    async def _ask(self, pod: Manifest, revision: Revision) -> PodMeasurement | None:
        try:
            body = await self._access.ready(pod, TIMEOUT_SECONDS)
        except PodUnreachable as reason:
            log.debug("%s: %s", pod["metadata"]["name"], reason)
            return None
        report = read_boot_report(body)
        if report is None or body.get("config_hash") != revision.config_hash:
            return None
        return PodMeasurement(pod["metadata"]["name"], _created_seconds(pod), report.measured_memory, report.steps)


def _created_seconds(pod: Manifest) -> int:
    created = parse_time(pod["metadata"].get("creationTimestamp"))
    return int(created.timestamp()) if created is not None else 0
