"""Whether a revision serves while its number of replicas changes: by scaling, or because a pod is replaced. Pure.

The pods decide and not the workload's counts: these are about its last generation until its controller has seen the new
number of replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream_operator.rendering.revision import Revision
from millstream_operator.workloads.replica import Replica
from millstream_operator.workloads.workload import WorkloadState


def serves_while_scaling(revision: Revision, state: WorkloadState | None, replicas: Sequence[Replica]) -> bool:
    """At least one replica of the revision is ready, and none of another revision is left that must go."""
    if state is None or state.digest != revision.digest:
        return False
    living = [one for one in replicas if not one.is_terminating]
    if any(one.digest != revision.digest for one in living):
        return False
    return any(one.is_ready for one in living)
