"""Which pods may still be downloading: by the size of their checkpoint, where nothing is known of their bytes. Pure.

A Deployment's deadline begins with its rollout and knows no sizes. So a pod is not late before its own download, begun
when its init container was, has had time for the checkpoint at a rate that any network should give.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.diagnosis.pod_facts import digest_of_pod, download_statuses, seconds_between
from millstream_operator.rendering.download_size import download_seconds

Manifest = dict[str, Any]


def remaining_download_seconds(
    owner: LLMDeployment, pods: Iterable[Manifest], plan: Mapping[str, Any], digest: str, now: str
) -> dict[str, float]:
    """Return the seconds that are left, by uid, of the revision's pods that download and are within their time.

    A deadline that the spec sets is taken as it is. `plan` is the revision's `status.plan`; `now` is RFC 3339, UTC.
    """
    if owner.spec.rollout is not None and owner.spec.rollout.progress_deadline is not None:
        return {}
    left: dict[str, float] = {}
    for pod in pods:
        took = seconds_between(_downloading_since(pod), now)
        if digest_of_pod(pod) == digest and took is not None:
            left[str(pod["metadata"].get("uid"))] = download_seconds(plan, pod) - took
    return {uid: seconds for uid, seconds in left.items() if seconds > 0}


def _downloading_since(pod: Manifest) -> str | None:
    """Return when the first download of a pod began that downloads now; its draft's follows that of the model."""
    states = [one.get("state", {}) for one in download_statuses(pod)]
    if not any("running" in state for state in states):
        return None
    began = [(state.get("terminated") or state.get("running") or {}).get("startedAt") for state in states]
    return next((time for time in began if time), None)
