"""A plan that replaced another one for the same spec (updatePolicy FollowOperator), as an entry of the journal. Pure.

It is found from the two newest records, so the journal gets its entry also when the operator ends between the record
and the status.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from millstream_operator.diagnosis.decisions import Decision, DecisionType, attempt_of
from millstream_operator.rollout.journal_marks import Entries, not_in_journal, with_journal
from millstream_operator.rollout.outdated import other_defaults, same_choice
from millstream_operator.rollout.revisions import PinnedRevision, newest_first, read_pin
from millstream_operator.rollout.unproven_plans import is_blind

Manifest = dict[str, Any]


def with_adoption(
    kept: PinnedRevision, records: Sequence[Manifest], entries: Entries
) -> tuple[PinnedRevision, tuple[Decision, ...]]:
    """Return the pinned revision with the mark that it shall have, and the adoption if the journal lacks it."""
    newest, *others = newest_first(records)[:2]
    adopted, before = read_pin(newest), read_pin(others[0]) if others else None
    if adopted is None or before is None or adopted.revision.input_hash != before.revision.input_hash:
        return kept, ()
    if before.revision.tuned_draft != adopted.revision.tuned_draft:
        return kept, ()  # the tuning of the draft has its own entry
    if before.marks.failure is not None:
        return kept, ()  # back to what served before: the rollback has its own entry
    if adopted.marks.journaled is None and _is_entry_of_older_version(entries, before, adopted):
        return kept, ()
    decision = _adoption(before, adopted)
    announced = not_in_journal(adopted.marks, (decision,), entries)
    if announced or kept.revision.name != adopted.revision.name:
        return kept, announced
    return replace(kept, marks=with_journal(kept.marks, (decision,), announced)), ()


def _adoption(before: PinnedRevision, adopted: PinnedRevision) -> Decision:
    was, now = before.revision, adopted.revision
    if same_choice(was.plan, now.plan):
        what = other_defaults(was.image, now.image)
    else:
        what = f"{was.plan['summary']} → {now.plan['summary']}."
    why = "runtime.updatePolicy is FollowOperator"
    if is_blind(was.plan) and not before.marks.answered:
        why = "the GPUs were not known when it was planned, and its pods have not answered yet"
    elif not before.marks.answered and not same_choice(was.plan, now.plan):
        why = "the plan before never served, and others hold its GPUs"
    return Decision(
        DecisionType.PLAN_ADOPTED,
        f"is adopted, because {why}: {what}",
        attempt_of(now.name, adopted.number),
    )


def _is_entry_of_older_version(entries: Entries, before: PinnedRevision, adopted: PinnedRevision) -> bool:
    """Whether the newest entry of the type is this adoption, as versions before the mark worded it.

    Such an entry does not begin with its attempt. The sentence is composed as they did and compared as a whole.
    """
    newest = next((entry for entry in entries if entry["type"] == DecisionType.PLAN_ADOPTED), None)
    was, now = before.revision, adopted.revision
    words = f"{was.plan['summary']} → {now.plan['summary']}"
    if was.plan["summary"] == now.plan["summary"] and was.image != now.image:
        words = f"A new plan would run the image {now.image} instead of {was.image}"
    elif was.plan["summary"] == now.plan["summary"]:
        words = "A new plan would render other pods: the pods' defaults or the operator's version have changed"
    return newest is not None and newest["message"] == f"runtime.updatePolicy is FollowOperator: {words}."
