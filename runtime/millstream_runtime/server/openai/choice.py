"""One choice of an answer: tokens in, text that may be shown out, with log-probabilities if requested."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from millstream_runtime.engine.request import FinishReason, Prefill, TokenOutput
from millstream_runtime.server.openai.echo import Echo, echo_entries
from millstream_runtime.server.openai.logprob_entry import LogprobEntry, TokenBytes, logprob_entry
from millstream_runtime.server.openai.stop_strings import StopStrings
from millstream_runtime.tokenizing.detokenizer import Detokenizer

# Of a long echo: what is made and encoded before other clients have a turn. With 20 alternatives 128 tokens take 3 to
# 8 ms, and several clients may each have such a part in one iteration of the event loop.
ECHO_PART_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice that may be shown now, and the finish reason if it is the last."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    tokens: tuple[LogprobEntry, ...] | None = None  # None: log-probabilities were not requested
    num_tokens: int = 0  # of the choice so far, with those that have no text


class Choice:
    """Turns the tokens of one choice into text; handles stop strings, log-probabilities and the echoed prompt."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        min_tokens: int,
        *,
        echo: Echo | None = None,
        token_bytes: TokenBytes | None = None,
        drops_answer: bool = False,
        shows_every_token: bool = False,
    ) -> None:
        """`token_bytes`: the bytes of a token; given where log-probabilities are shown. `shows_every_token`: make a
        delta also for a token without text, such as the first byte of a character."""
        self.num_tokens = 0
        self._index = index
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._has_stops = bool(stops)
        self._min_tokens = min_tokens
        self._echo = echo
        self._echo_end: tuple[str, list[LogprobEntry]] = (echo.text if echo is not None else "", [])
        self._token_bytes = token_bytes
        self._drops_answer = drops_answer
        self._shows_every_token = shows_every_token
        self._characters = len(echo.text) if echo is not None else 0
        self._plain_characters = 0  # still to come, of tokens up to `min_tokens`
        self._logprob_sum = 0.0

    @property
    def mean_logprob(self) -> float:
        """Mean per token, in nats; minus infinity for an answer without tokens."""
        return self._logprob_sum / self.num_tokens if self.num_tokens else -math.inf

    def echo_parts(self, prefill: Prefill) -> Iterator[Delta]:
        """All of a long echo with log-probabilities but its end, in deltas of ECHO_PART_TOKENS each.

        The end comes with the first token. Each delta is made when it is asked for.
        """
        if self._echo is None or self._token_bytes is None or prefill.prompt_logprobs is None:
            return
        entries = echo_entries(self._echo, prefill.prompt_logprobs, self._token_bytes)
        part, shown_characters = [*islice(entries, ECHO_PART_TOKENS)], 0
        while rest := [*islice(entries, ECHO_PART_TOKENS)]:
            end = rest[0].text_offset
            yield Delta(self._index, self._echo.text[shown_characters:end], None, tuple(part))
            part, shown_characters = rest, end
        self._echo_end = self._echo.text[shown_characters:], part

    def push(self, output: TokenOutput) -> Delta | None:
        """Add an output, behind its `echo_parts`; return what the client may see now, or None."""
        text = ""
        tokens: list[LogprobEntry] = []
        if output.prefill is not None:
            text, tokens = self._echo_end
        if self._drops_answer and output.token_id is not None:
            reason: FinishReason | None = FinishReason.LENGTH
        else:
            offset = self._characters + (len(self._detokenizer.pending()) if self._token_bytes is not None else 0)
            text += self._answer(output)
            reason = FinishReason.STOP if self._stops.found else output.finish_reason
            # Every sampled token, also one that ends the answer and is no part of its text: lm-eval counts them.
            if self._token_bytes is not None and output.logprobs is not None:
                tokens.append(logprob_entry(self._token_bytes, output.logprobs, offset))
        if not text and not tokens and reason is None and not self._shows_every_token:
            return None
        shown = tuple(tokens) if self._token_bytes is not None else None
        return Delta(self._index, text, reason, shown, self.num_tokens)

    def _answer(self, output: TokenOutput) -> str:
        """Text that became safe to show with this token."""
        text = ""
        if output.token_id is not None:
            self.num_tokens += 1
            self._logprob_sum += output.logprobs.logprob if output.logprobs is not None else 0.0
            if output.finish_reason is not FinishReason.STOP:  # a stop token itself is not part of the answer
                text = self._safe(self._detokenizer.push(output.token_id)) + self._stopped()
        if output.finish_reason is not None:
            text += self._safe(self._detokenizer.finish()) + self._stops.finish()
        return text

    def _stopped(self) -> str:
        """The end of the answer, where characters that the detokenizer holds back complete a stop string."""
        if not self._has_stops or self._stops.found:
            return ""
        pending = self._detokenizer.pending()
        if self.num_tokens <= self._min_tokens:
            self._plain_characters = len(pending)
        elif self._stops.would_find(pending[self._plain_characters :]):
            return self._safe(self._detokenizer.finish())
        return ""

    def _safe(self, text: str) -> str:
        self._characters += len(text)
        # Before min_tokens a stop string is plain text, as a stop token is for the engine.
        if self.num_tokens <= self._min_tokens:
            return text
        plain, searched = text[: self._plain_characters], text[self._plain_characters :]
        self._plain_characters -= len(plain)
        return plain + self._stops.push(searched)
