"""When a request ends: at a stop token, at a token that ends the text, at its own length or at the model's."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_runtime.engine.request import FinishReason
from millstream_runtime.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Ending:
    """The limits of one model, as an engine applies them."""

    max_model_len: int  # tokens, prompt and answer together
    eos_token_ids: frozenset[int]

    def reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Why `sequence` ends with this token, which it has accepted; None: it goes on."""
        params = sequence.request.sampling
        if token_id in params.stop_token_ids:  # before min_tokens, the sampler suppresses these and EOS
            return FinishReason.STOP
        if token_id in self.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.is_at_length(sequence, sequence.num_read_tokens) else None

    def tokens_left(self, sequence: Sequence) -> int:
        """How many more tokens may come of a sequence before it is at its length."""
        known = len(sequence.token_ids)
        asked = sequence.num_prompt_tokens + sequence.request.sampling.max_tokens
        return min(asked, self.max_model_len) - known

    def is_at_length(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` has reached `max_tokens` or `max_model_len`."""
        num_generated = num_tokens - sequence.num_prompt_tokens
        return num_generated >= sequence.request.sampling.max_tokens or num_tokens >= self.max_model_len
