"""Which decisions of a rollout the journal (`status.decisions`) holds already. Pure.

A rollout is decided again in every turn, with details that may vary, and each attempt has one entry per type. The types
that are in the journal are a mark on the attempt's ControllerRevision. The status is written before the mark, so the
operator may end in between; and records of older versions have no such mark. Then the entry itself is recognised, by
the attempt that its message begins with (`is_entry_of`).

    record          entry   decision     write
    marked          any     left out     none
    not marked      there   left out     the mark, unless an older version wrote the record
    not marked      absent  announced    the entry, then the mark

So an upgrade writes neither entry nor mark, until something new is decided about the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from millstream_operator.diagnosis.decisions import Decision, is_entry_of
from millstream_operator.rendering.revision_marks import Marks

Entries = Sequence[Mapping[str, Any]]


def not_in_journal(marks: Marks, decisions: Iterable[Decision], entries: Entries) -> tuple[Decision, ...]:
    """Return the decisions to announce."""
    marked = marks.journaled or frozenset()
    return tuple(
        one for one in decisions if one.mark not in marked and not any(is_entry_of(entry, one) for entry in entries)
    )


def with_journal(marks: Marks, decisions: Sequence[Decision], announced: Sequence[Decision]) -> Marks:
    """Return the marks after `decisions`, of which `announced` are new."""
    if marks.journaled is None and not announced:
        return marks  # of an older version: its entries are recognised, and nothing is written
    return replace(marks, journaled=(marks.journaled or frozenset()) | {one.mark for one in decisions})
