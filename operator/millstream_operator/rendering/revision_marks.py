"""Marks of a revision: that it served, how it is rolled out, why it failed, and which decisions were announced.

The data of a ControllerRevision cannot change; its annotations can. So the state of a rollout is on the record that it
is about, survives the operator, and is deleted with the record. Marks belong to one attempt: a record that is pinned
again, under a higher number, begins with new ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from millstream_operator.api.status import AppliedStrategy

ANSWERED_ANNOTATION = "millstream.dev/answered"
STRATEGY_ANNOTATION = "millstream.dev/rollout-strategy"
FAILED_ANNOTATION = "millstream.dev/failed"
RETRIES_ANNOTATION = "millstream.dev/retries"
JOURNALED_ANNOTATION = "millstream.dev/journaled"
PUT_OFF_ANNOTATION = "millstream.dev/put-off"
EVIDENCE_ANNOTATION = "millstream.dev/evidence"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a revision was given up: a reason of docs/reasons.md and its sentence.

    `retry_at`: when it is tried again, RFC 3339, UTC; None: not before the spec changes. `retry`: what
    `spec.rollout.retry` was when it failed.
    """

    reason: str
    message: str
    retry_at: str | None = None
    retry: str | None = None


@dataclass(frozen=True, slots=True)
class Marks:
    answered: bool = False  # all its replicas were available, and the model answered through the Service
    strategy: AppliedStrategy | None = None  # what rollout.strategy Auto chose for it
    failure: Failure | None = None
    retries: int = 0  # attempts before this one that failed for a cause that was not the revision's
    journaled: frozenset[str] | None = None  # types of its decisions in `status.decisions`; None: from before this mark
    put_off: bool = False  # its GPUs were taken after an old pod was drained for it: it waits until others are free
    evidence: str | None = None  # of its staged shift (`rollout/traffic_shift/evidence_record.py`)

    def annotations(self) -> dict[str, str]:
        found = {
            ANSWERED_ANNOTATION: "true" if self.answered else None,
            STRATEGY_ANNOTATION: self.strategy.value if self.strategy else None,
            FAILED_ANNOTATION: self._failed(),
            RETRIES_ANNOTATION: str(self.retries) if self.retries else None,
            JOURNALED_ANNOTATION: ",".join(sorted(self.journaled)) if self.journaled is not None else None,
            PUT_OFF_ANNOTATION: "true" if self.put_off else None,
            EVIDENCE_ANNOTATION: self.evidence,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _failed(self) -> str | None:
        if self.failure is None:
            return None
        found = {"reason": self.failure.reason, "message": self.failure.message}
        again = {"retryAt": self.failure.retry_at, "retry": self.failure.retry}
        again = {name: value for name, value in again.items() if value is not None}
        return json.dumps(found | again, ensure_ascii=False)


NEW_MARKS = Marks(journaled=frozenset())  # of a new attempt


def read_marks(record: dict[str, Any]) -> Marks:
    """Return the marks of a stored record. A value that the operator cannot have written counts as absent."""
    annotations = record["metadata"].get("annotations") or {}
    strategy = annotations.get(STRATEGY_ANNOTATION)
    return Marks(
        answered=annotations.get(ANSWERED_ANNOTATION) == "true",
        strategy=next((known for known in AppliedStrategy if known.value == strategy), None),
        failure=_failure(annotations.get(FAILED_ANNOTATION)),
        retries=_count(annotations.get(RETRIES_ANNOTATION)),
        journaled=_journaled(annotations.get(JOURNALED_ANNOTATION)),
        put_off=annotations.get(PUT_OFF_ANNOTATION) == "true",
        evidence=annotations.get(EVIDENCE_ANNOTATION),
    )


def _failure(text: str | None) -> Failure | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
        retry_at, retry = (value if isinstance(value := found.get(key), str) else None for key in ("retryAt", "retry"))
        return Failure(str(found["reason"]), str(found["message"]), retry_at, retry)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 4 else 0


def _journaled(text: str | None) -> frozenset[str] | None:
    return frozenset(filter(None, text.split(","))) if text is not None else None
