"""Times that follow from the spec alone: the drain timeout and the progress deadline."""

from __future__ import annotations

from millstream_operator.api import duration
from millstream_operator.api.rules import DEFAULT_WARMUP_TIMEOUT
from millstream_operator.api.spec import LLMDeploymentSpec, Rollout, Warmup

DEFAULT_DRAIN_TIMEOUT = "10m"
PROGRESS_MARGIN_SECONDS = 600  # for scheduling and pulling the image, before the warm-up begins


def drain_timeout_seconds(spec: LLMDeploymentSpec) -> int:
    """Return the seconds that a terminating pod has to finish its requests."""
    return duration.seconds((spec.rollout or Rollout()).drain_timeout or DEFAULT_DRAIN_TIMEOUT)


def progress_deadline_seconds(spec: LLMDeploymentSpec) -> int:
    """Return the seconds without progress after which a rollout has failed. Not in the plan: it restarts no pod."""
    if spec.rollout is not None and spec.rollout.progress_deadline is not None:
        return duration.seconds(spec.rollout.progress_deadline)
    timeout = (spec.warmup or Warmup()).timeout or DEFAULT_WARMUP_TIMEOUT
    return duration.seconds(timeout) + PROGRESS_MARGIN_SECONDS
