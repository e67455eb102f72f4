"""How many tokens the draft model reads before it drafts: a bounded time per step. Pure: no torch, no clock.

    a decode behind accepted drafts    1 or 2 tokens: always
    a prompt, or a prefix that the cache knew and the draft model did not: in chunks, over several steps

Answers that are under way wait for it, so a chunk takes no longer than CHUNK_SECONDS, by what earlier ones took. A
request that would end before it is caught up with is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

ALWAYS_TOKENS = 4
FIRST_TOKENS, LEAST_TOKENS, MOST_TOKENS = 64, 16, 512  # of a step, beside those that are always read
CHUNK_SECONDS = 0.02
NEW_SHARE = 0.3  # of what is known, by the latest chunk
LEAST_TIMED_TOKENS = 16  # of a chunk: shorter ones say little about the time of a token


class CatchingUp:
    """See above."""

    def __init__(self, most_tokens: int) -> None:
        """`most_tokens`: of a step, whatever was measured."""
        self._most_tokens = min(MOST_TOKENS, most_tokens)
        self._token_seconds: float | None = None

    @property
    def chunk_tokens(self) -> int:
        """What all sequences of a step read together, beside what is always read."""
        if self._token_seconds is None:
            return min(FIRST_TOKENS, self._most_tokens)
        tokens = round(CHUNK_SECONDS / self._token_seconds) if self._token_seconds > 0 else MOST_TOKENS
        return min(max(tokens, LEAST_TOKENS), self._most_tokens)

    def divide(self, needs: Seq[tuple[int, int]]) -> list[int]:
        """Return how many tokens each sequence reads now; the first come first.

        `needs`: for each sequence its unread tokens, and how many more may come before it ends.
        """
        chunk_tokens = left = self.chunk_tokens
        counts = []
        for num_unread, num_coming in needs:
            count = num_unread
            if num_unread > ALWAYS_TOKENS:
                is_worth_it = -(-num_unread // chunk_tokens) < num_coming
                count = min(num_unread, left) if is_worth_it else 0
                left -= count
            counts.append(count)
        return counts

    def seconds(self, num_unread: int) -> float:
        """What reading them takes; 0 where they are always read, or no time is known yet."""
        return num_unread * (self._token_seconds or 0.0) if num_unread > ALWAYS_TOKENS else 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a pass that took so long."""
        if num_tokens < LEAST_TIMED_TOKENS:
            return
        known, new = self._token_seconds, seconds / num_tokens
        self._token_seconds = new if known is None else (1 - NEW_SHARE) * known + NEW_SHARE * new
