"""How many bytes of a text are a token: learned per model from answers, which report the tokens of their prompts."""

from __future__ import annotations

FIRST_BYTES_PER_TOKEN = 4.0  # English, until the first answer
KEPT_SHARE = 0.99  # of what was learned, per answer: the last few hundred count


class TokenRatio:
    """Bytes per token of one model: sums over the last answers, so that a long prompt counts for more than a short."""

    def __init__(self) -> None:
        self._text_bytes = 0.0
        self._tokens = 0.0

    def observe(self, text_bytes: int, tokens: int) -> None:
        """Learn from an answered prompt."""
        if text_bytes > 0 and tokens > 0:
            self._text_bytes = self._text_bytes * KEPT_SHARE + text_bytes
            self._tokens = self._tokens * KEPT_SHARE + tokens

    @property
    def bytes_per_token(self) -> float:
        """Return the learned ratio."""
        return self._text_bytes / self._tokens if self._tokens else FIRST_BYTES_PER_TOKEN

    def tokens(self, text_bytes: float) -> float:
        """Return how many tokens a text of this size has."""
        return text_bytes / self.bytes_per_token
