"""When a turn must be repeated though no watch event may come for it."""

from __future__ import annotations

from millstream_operator.queue.work_queue import RequeueAfter, RetryLater
from millstream_operator.reconciling.context import ReconcileContext

RECHECK_BLOCKER_SECONDS = 30.0


def requeue(context: ReconcileContext, *, probe_failed: bool) -> None:
    """Return where nothing is left to do.

    Raises:
        RequeueAfter: the operator waits for another controller or a person.
        RetryLater: the model does not answer yet.
    """
    if context.problem is not None:
        raise RequeueAfter(context.problem.message, RECHECK_BLOCKER_SECONDS)
    if context.answer is not None and context.answer.failure is not None:
        raise RetryLater(context.answer.failure.message)
    if probe_failed:
        raise RetryLater("the model does not answer through its Service yet")
    if context.companions is not None and context.companions.problem:
        raise RequeueAfter(context.companions.problem, RECHECK_BLOCKER_SECONDS)
    if context.draft.recheck_seconds is not None and context.draft.condition is not None:
        raise RequeueAfter(context.draft.condition.message, context.draft.recheck_seconds)
