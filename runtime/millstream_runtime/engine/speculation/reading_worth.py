"""Whether a draft model should read a prompt at all. Pure: no torch, no clock.

    reading takes      tokens not read * seconds per token                     once per request
    drafts then save   seconds saved per token * tokens that are still to come

A long prompt with a short answer, as in retrieval, costs more to read than its drafts can save. How many tokens are to
come nobody knows: the mean of the answers before it is taken; of one that is longer than that already, as many more as
it has.
"""

from __future__ import annotations

NEW_SHARE = 0.1  # of the mean, by the latest answer


class ReadingWorth:
    """See above."""

    def __init__(self) -> None:
        self._mean_tokens: float | None = None

    def observe_answer(self, num_tokens: int) -> None:
        """Learn that an answer has ended with so many tokens."""
        known = self._mean_tokens
        self._mean_tokens = num_tokens if known is None else (1 - NEW_SHARE) * known + NEW_SHARE * num_tokens

    def expected_tokens(self, num_generated: int, most: int) -> float:
        """How many more tokens will come. `most`: as the request allows."""
        if self._mean_tokens is None:
            return most
        return min(most, max(self._mean_tokens - num_generated, num_generated))

    def is_worth(self, reading_seconds: float, saved_seconds_per_token: float, num_generated: int, most: int) -> bool:
        """Whether drafts are expected to save what reading takes."""
        return reading_seconds <= saved_seconds_per_token * self.expected_tokens(num_generated, most)
