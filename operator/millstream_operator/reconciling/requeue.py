"""When a turn must be repeated though no watch event may come for it."""

from __future__ import annotations

from millstream_operator.diagnosis.admission import NOT_JUDGED_YET
from millstream_operator.queue.work_queue import RequeueAfter, RetryLater
from millstream_operator.reconciling.context import ReconcileContext

ANSWERED_SECONDS = 1.0
NOT_JUDGED_SECONDS = 1.0


def requeue(context: ReconcileContext, *, probe_failed: bool, recheck_seconds: float) -> None:
    """Return where nothing is left to do. `recheck_seconds`: until what blocks is looked at again.

    Raises:
        RequeueAfter: the operator waits for another controller or a person, or has more to do at once.
        RetryLater: the model does not answer yet.
    """
    if context.problem is not None:
        is_soon_over = context.problem.cause == NOT_JUDGED_YET
        raise RequeueAfter(context.problem.message, NOT_JUDGED_SECONDS if is_soon_over else recheck_seconds)
    if context.answer is not None and context.answer.failure is not None:
        raise RetryLater(context.answer.failure.message)
    if probe_failed:
        raise RetryLater("the model does not answer through its Service yet")
    if context.companions is not None and context.companions.problem:
        raise RequeueAfter(context.companions.problem, recheck_seconds)
    draft = context.draft
    if draft.waits_for_answer and _has_answered(context):  # its record was marked behind the stage that asks for it
        raise RequeueAfter("the model has answered: the tuning of its draft begins", ANSWERED_SECONDS)
    if draft.recheck_seconds is not None and draft.condition is not None:
        raise RequeueAfter(draft.condition.message, draft.recheck_seconds)


def _has_answered(context: ReconcileContext) -> bool:
    return context.answer is not None and context.running is context.rollout.pin.revision
