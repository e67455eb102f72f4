"""What is remembered of a revision beside its content: that it served, how it is rolled out, and why it failed.

A ControllerRevision's data can never change; its annotations can. So the memory of a rollout lies on the record that it
is about, survives the operator, and goes when the record goes. Marks belong to one attempt: a record that is pinned
again, under a higher number, begins without them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from millstream_operator.api.status import AppliedStrategy

ANSWERED_ANNOTATION = "millstream.dev/answered"
STRATEGY_ANNOTATION = "millstream.dev/rollout-strategy"
FAILED_ANNOTATION = "millstream.dev/failed"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a revision was given up: a reason of docs/reasons.md and its sentence."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Marks:
    answered: bool = False  # all its replicas were available, and the model answered through the Service
    strategy: AppliedStrategy | None = None  # what rollout.strategy Auto chose for it
    failure: Failure | None = None  # it is not tried again

    def annotations(self) -> dict[str, str]:
        found = {
            ANSWERED_ANNOTATION: "true" if self.answered else None,
            STRATEGY_ANNOTATION: self.strategy.value if self.strategy else None,
            FAILED_ANNOTATION: self._failed(),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _failed(self) -> str | None:
        if self.failure is None:
            return None
        return json.dumps({"reason": self.failure.reason, "message": self.failure.message}, ensure_ascii=False)


def read_marks(record: dict[str, Any]) -> Marks:
    """The marks of a stored record. What nobody of us can have written counts as not there."""
    annotations = record["metadata"].get("annotations") or {}
    strategy = annotations.get(STRATEGY_ANNOTATION)
    return Marks(
        answered=annotations.get(ANSWERED_ANNOTATION) == "true",
        strategy=next((known for known in AppliedStrategy if known.value == strategy), None),
        failure=_failure(annotations.get(FAILED_ANNOTATION)),
    )


def _failure(text: str | None) -> Failure | None:
    if text is None:
        return None
    try:
        told = json.loads(text)
        return Failure(str(told["reason"]), str(told["message"]))
    except (ValueError, TypeError, KeyError):
        return None
