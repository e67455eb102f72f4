"""How much of a conversation's turn before is found where it is guessed to be: learned from answers."""

from __future__ import annotations

KEPT_SHARE = 0.98  # of what was learned, per answer: the last fifty count


class GuessedShare:
    """The mean share of guessed tokens that the replica had in its cache. Before the first answer, all."""

    def __init__(self) -> None:
        self._found = 1.0
        self._guesses = 1.0

    def observe(self, share: float) -> None:
        """Learn from an answer. `share`: of the guessed tokens, those that were cached."""
        self._found = self._found * KEPT_SHARE + min(1.0, share)
        self._guesses = self._guesses * KEPT_SHARE + 1.0

    @property
    def mean(self) -> float:
        """Return the share to expect."""
        return self._found / self._guesses
