"""How fast prompts are computed: their tokens per second of the steps that compute some.

Tokens per second of the clock would rank a busy engine above an idle one, which has none. A step counts whole, with the
answers that share it. Recent steps count more: what is HALF_LIFE_TOKENS of prompts old counts half. The age is in
tokens, so many short prompts, whose steps read all weights for little, do not hide what a long one takes.
"""

from __future__ import annotations

from dataclasses import dataclass

HALF_LIFE_TOKENS = 8192


@dataclass(slots=True)
class PrefillRate:
    """Sums over steps, older ones less."""

    _tokens: float = 0.0
    _seconds: float = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Count a step that computed `num_tokens` of prompts."""
        kept = 0.5 ** (num_tokens / HALF_LIFE_TOKENS)
        self._tokens = kept * self._tokens + num_tokens
        self._seconds = kept * self._seconds + seconds

    @property
    def tokens_per_second(self) -> float:
        """0 before the first step."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0
