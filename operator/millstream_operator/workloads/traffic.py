"""What replicas answered, by their own counters. Pure.

Generations that a client gave up (`finished_reason="abort"`) say nothing about the model, so they are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts since a process began, or in a span of time.

    `stop`, `length`, `error`: finished generations by vLLM's `finished_reason`; one whose numbers are not finite ends
    with `error`. `intervals`: the measured times from one token to the next, and `intervals_seconds` their sum.
    """

    stop: int = 0
    length: int = 0
    error: int = 0
    intervals: int = 0
    intervals_seconds: float = 0.0

    @property
    def finished(self) -> int:
        return self.stop + self.length + self.error

    @property
    def mean_interval_seconds(self) -> float | None:
        return self.intervals_seconds / self.intervals if self.intervals else None

    def since(self, before: Traffic) -> Traffic:
        """Return what came after `before`. A process that began anew counts from zero."""
        if any(getattr(self, one.name) < getattr(before, one.name) for one in fields(self)):
            return self
        return Traffic(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(self)))


NO_TRAFFIC = Traffic()


def total(parts: Iterable[Traffic]) -> Traffic:
    """Return the sum of what several replicas answered."""
    known = list(parts)
    return Traffic(*(sum(getattr(part, one.name) for part in known) for one in fields(Traffic)))
