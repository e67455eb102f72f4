"""Try a revision again that was rolled back for a cause that is not its own. Pure.

    rolled back at the deadline, because an image, a node, a hub, a quota or a GPU was missing
        -> after 10 minutes a new attempt, after 40 more the second, after 160 more the third and last

A failure of the revision itself (a crash, a bad configuration, out of memory, an image that does not exist) is not
tried again until the spec changes, or until `spec.rollout.retry` has another value than when it failed: that is an
attempt of the user's, and the pauses begin anew after it. When the next attempt is due, and how many there were, is on
the revision's record, so a restart of the operator neither forgets an attempt nor makes one more.
"""

from __future__ import annotations

import datetime
from dataclasses import replace

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.diagnosis.decisions import Decision, DecisionType, attempt_of
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.pod_facts import parse_time, seconds_between
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.rendering.revision_marks import NEW_MARKS, Failure, Marks
from millstream_operator.rollout.certain_failure import names_no_image
from millstream_operator.rollout.revisions import PinnedRevision

PAUSES_SECONDS = (600, 2400, 9600)
# What is missing in the cluster or on the network, and may come back.
NOT_ITS_OWN = frozenset(
    {
        Reason.ADMISSION_UNAVAILABLE,
        Reason.DOWNLOAD_FAILED,
        Reason.EVICTED,
        Reason.IMAGE_PULL_FAILED,
        Reason.INSUFFICIENT_GPU,
        Reason.NODE_LOST,
        Reason.QUOTA_EXCEEDED,
        Reason.UNSCHEDULABLE,
        Reason.VOLUME_PENDING,
    }
)


def failure_of(owner: LLMDeployment, found: Diagnosis, marks: Marks, now: str | None) -> Failure:
    """Return the failure with the time of the next attempt, where there is one. `now` is RFC 3339, UTC."""
    return Failure(str(found.reason), found.message, _retry_at(found, marks, now), asked_retry(owner))


def asked_retry(owner: LLMDeployment) -> str | None:
    return owner.spec.rollout.retry if owner.spec.rollout is not None else None


def again(owner: LLMDeployment, pin: PinnedRevision, now: str | None) -> tuple[PinnedRevision, Decision] | None:
    """Return the next attempt and its announcement; None while none is due."""
    failure, marks = pin.marks.failure, pin.marks
    if failure is None:
        return None
    if (asked := asked_retry(owner)) is not None and asked != failure.retry:
        return _asked_attempt(pin, asked, failure)
    if failure.retry_at is None or not is_due(failure, now):
        return None
    count = marks.retries + 1
    attempt = PinnedRevision(pin.revision, pin.number + 1, replace(NEW_MARKS, retries=count))
    return attempt, Decision(
        DecisionType.ROLLOUT_RETRIED,
        f"is tried again ({count} of {len(PAUSES_SECONDS)}), because its last failure was not its own: "
        f"{failure.reason}: {failure.message}",
        attempt_of(attempt.revision.name, attempt.number),
    )


def _asked_attempt(pin: PinnedRevision, asked: str, failure: Failure) -> tuple[PinnedRevision, Decision]:
    """The attempt that `spec.rollout.retry` asks for."""
    attempt = PinnedRevision(pin.revision, pin.number + 1, NEW_MARKS)
    return attempt, Decision(
        DecisionType.ROLLOUT_RETRIED,
        f"is tried again, because spec.rollout.retry is {asked!r}. Its last failure: {failure.reason}: "
        f"{failure.message}",
        attempt_of(attempt.revision.name, attempt.number),
    )


def is_due(failure: Failure, now: str | None) -> bool:
    remaining = remaining_seconds(failure, now)
    return remaining is not None and remaining <= 0


def remaining_seconds(failure: Failure, now: str | None) -> float | None:
    """Return the seconds until the next attempt; None where there is none."""
    return seconds_between(now, failure.retry_at)


def _retry_at(found: Diagnosis, marks: Marks, now: str | None) -> str | None:
    time = parse_time(now)
    if time is None or found.reason not in NOT_ITS_OWN or names_no_image(found) or marks.retries >= len(PAUSES_SECONDS):
        return None
    due = time + datetime.timedelta(seconds=PAUSES_SECONDS[marks.retries])
    return due.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
