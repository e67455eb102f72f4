"""When it is certain that a new revision will not get ready. Pure.

A verdict that comes too early gives up on a pod that only waits; one that comes too late leaves the model without a
pod, where an old pod was drained for the new one. So three kinds of evidence count: a reason that no retry resolves, a
pod that failed again and again, and, for everything temporary (no free GPU, a hub that is down), the end of
`rollout.progressDeadline`, unless a pod still downloads or loads and its bytes move.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from millstream_operator.diagnosis.admission import pods_not_created
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.pod_facts import digest_of_pod, is_ready
from millstream_operator.diagnosis.pod_failures import diagnose, diagnose_pod
from millstream_operator.diagnosis.reasons import NEEDS_A_PERSON, Reason
from millstream_operator.rendering.kueue import is_gated_by_kueue
from millstream_operator.rollout.workload import DEADLINE_FIX, deadline_passed, replica_failure
from millstream_operator.workloads.workload import WorkloadState

Manifest = dict[str, Any]
# With the kubelet's back-off of 10 s, 20 s and 40 s: a bit more than a minute.
CERTAIN_RESTARTS = 3
CRASHES = frozenset({Reason.OUT_OF_MEMORY, Reason.PORT_IN_USE, Reason.RUNTIME_CRASHED, Reason.WARMUP_STALLED})
# What the kubelet reports when another try gives the same answer; a registry that is down may come back.
_NO_SUCH_IMAGE = re.compile(
    r"not found|manifest unknown|denied|unauthorized|forbidden|invalid reference|couldn't parse image", re.IGNORECASE
)

_QUOTED = re.compile(r'"[^"]*"')  # the image's own name, which may hold any of these words


def certain_failure(
    digest: str, state: WorkloadState | None, pods: Sequence[Manifest], advancing: Collection[str] = ()
) -> Diagnosis | None:
    """Why the revision of this digest will not get ready; None while it still may.

    `advancing`: the uids of pods that download or load, and whose bytes move. The Deployment controller sees no bytes,
    so its deadline does not end them.
    """
    own = [pod for pod in pods if digest_of_pod(pod) == digest]
    if (found := diagnose(pod for pod in own if _is_certain(pod))) is not None:
        return found
    if (message := replica_failure(state, digest)) is not None:
        refused = pods_not_created(message)
        if refused is not None and (refused.reason in NEEDS_A_PERSON or deadline_passed(state, digest)):
            return refused
    on_time = [is_ready(pod) or pod["metadata"].get("uid") in advancing for pod in own]
    waits_for_quota = any(map(is_gated_by_kueue, own))
    if not deadline_passed(state, digest) or waits_for_quota or (own and all(on_time)):
        return None  # of a pod that is ready, the Deployment controller learns a moment later
    late = Diagnosis(
        Reason.PROGRESS_DEADLINE_EXCEEDED, "The rollout made no progress within rollout.progressDeadline.", DEADLINE_FIX
    )
    return diagnose(own) or late


def names_no_image(found: Diagnosis) -> bool:
    """Whether the registry answered that there is no such image, or that it may not be pulled."""
    return found.reason is Reason.IMAGE_PULL_FAILED and bool(_NO_SUCH_IMAGE.search(_QUOTED.sub("", found.cause)))


def _is_certain(pod: Manifest) -> bool:
    found = diagnose_pod(pod)
    if found is None:
        return False
    if found.reason is Reason.IMAGE_PULL_FAILED:
        return names_no_image(found)
    return found.reason in NEEDS_A_PERSON or (found.reason in CRASHES and _restarts(pod) >= CERTAIN_RESTARTS)


def _restarts(pod: Manifest) -> int:
    status = pod.get("status", {})
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    return max((one.get("restartCount", 0) for one in containers), default=0)
