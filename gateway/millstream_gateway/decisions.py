"""Decisions of this picker for one replica that no report has answered yet.

Reports are late, so a request counts from the moment of its decision: what was decided after the last report is added
to what that report says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from millstream_gateway.routed_request import RoutedRequest

MOST_DECISIONS = 1024  # kept per replica; of more the oldest is forgotten, and its answer corrects nothing
LONGEST_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Decision:
    """`last_uses`: of the chunks that were believed to be there, the number of the decision that had used each last.

    `is_guess`: its turn before was guessed to be there.
    """

    request: RoutedRequest
    number: int
    decided_at_seconds: float
    prompt_tokens: float
    uncached_tokens: float
    last_uses: tuple[int, ...]
    is_guess: bool


class UnansweredDecisions:
    """By the hash of the request's id, oldest first."""

    def __init__(self) -> None:
        self._by_id: dict[str, Decision] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, id_hash: str, decision: Decision) -> None:
        """Remember it; forget what is too old or too many."""
        self._by_id.pop(id_hash, None)
        self._by_id[id_hash] = decision
        while True:
            oldest_id = next(iter(self._by_id))
            age_seconds = decision.decided_at_seconds - self._by_id[oldest_id].decided_at_seconds
            if len(self._by_id) <= MOST_DECISIONS and age_seconds <= LONGEST_SECONDS:
                return
            del self._by_id[oldest_id]

    def pop(self, id_hash: str) -> Decision | None:
        """Return and forget the decision; None: another picker's, or forgotten."""
        return self._by_id.pop(id_hash, None)

    def since(self, seconds: float) -> Iterator[Decision]:
        """Yield what was decided at or after this time, newest first."""
        for decision in reversed(self._by_id.values()):
            if decision.decided_at_seconds < seconds:
                return
            yield decision

    def clear(self) -> None:
        """Forget all: the process that they were sent to is gone."""
        self._by_id.clear()
