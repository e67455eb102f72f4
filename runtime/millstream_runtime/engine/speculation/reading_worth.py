"""Whether a draft model should read a prompt at all. Pure: no torch, no clock.

    reading takes                 tokens not read * seconds per token                            once per request
    drafts save less than         seconds of a token without drafts * tokens still to come       all of them

A long prompt with a short answer, as in retrieval, takes longer to read than the whole answer takes without drafts.
That bound is all that is asked: what drafts save of it depends on who else drafts, since a pass of the draft model
takes nearly as long for one request as for a batch. To leave out those that save less than they cost by themselves
made batches of which only a part drafts, and these were slower than either all or none.

How many tokens are to come is not known: the mean of the answers before it is taken; of one that is longer than that
already, as many more as it has.
"""

from __future__ import annotations

NEW_SHARE = 0.1  # of the mean, by the latest answer


class ReadingWorth:
    """See above."""

    def __init__(self) -> None:
        self._mean_tokens: float | None = None

    def observe_answer(self, num_tokens: int) -> None:
        """Learn how many tokens an answer had when it ended."""
        known = self._mean_tokens
        self._mean_tokens = num_tokens if known is None else (1 - NEW_SHARE) * known + NEW_SHARE * num_tokens

    def expected_tokens(self, num_generated: int, most: int) -> float:
        """How many more tokens will come. `most`: as the request allows."""
        if self._mean_tokens is None:
            return most
        return min(most, max(self._mean_tokens - num_generated, num_generated))

    def may_pay(self, reading_seconds: float, plain_seconds_per_token: float, num_generated: int, most: int) -> bool:
        """Whether the rest of the answer takes longer than reading, without drafts."""
        return reading_seconds <= plain_seconds_per_token * self.expected_tokens(num_generated, most)
