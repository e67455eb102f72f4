"""Whether a revision serves while its number of replicas changes: by scaling, or because a pod is replaced. Pure.

The pods decide and not the Deployment's counts: these are about its last generation until its controller has seen the
new number of replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream_operator.diagnosis.pod_facts import is_leader, is_ready, is_terminating
from millstream_operator.rendering.revision import Revision
from millstream_operator.rollout.workload import digest_of, digest_of_pod

Manifest = dict[str, Any]


def serves_while_scaling(revision: Revision, workload: Manifest | None, pods: Sequence[Manifest]) -> bool:
    """At least one replica of the revision is ready, and no pod of another revision is left that must go."""
    if workload is None or digest_of(workload) != revision.digest:
        return False
    leaders = [pod for pod in pods if is_leader(pod) and not is_terminating(pod)]
    if any(digest_of_pod(pod) != revision.digest for pod in leaders):
        return False
    return any(is_ready(pod) for pod in leaders)
