"""One choice of an answer: tokens in, text that may be shown out, with log-probabilities if requested."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from millstream_runtime.engine.request import FinishReason, TokenLogprobs, TokenOutput
from millstream_runtime.server.openai.stop_strings import StopStrings
from millstream_runtime.tokenizing.detokenizer import Detokenizer

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """A token of the text, its log-probability and the top alternatives."""

    token: bytes
    text_offset: int  # characters of the choice's text before it
    logprob: float | None  # None: the first token of a prompt, which nothing predicts
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice that may be shown now, and the finish reason if it is the last."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    tokens: tuple[LogprobEntry, ...] | None = None  # None: log-probabilities were not requested
    num_tokens: int = 0  # of the choice so far, with those that have no text


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, shown before the answer."""

    text: str
    token_ids: Sequence[int]
    detokenizer: Detokenizer  # fresh: it says where in `text` each token begins


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
        self._min_tokens = min_tokens
        self._echo = echo
        self._token_bytes = token_bytes
        self._drops_answer = drops_answer
        self._shows_every_token = shows_every_token
        self._characters = len(echo.text) if echo is not None else 0
        self._logprob_sum = 0.0

    @property
    def mean_logprob(self) -> float:
        """Mean per token, in nats; minus infinity for an answer without tokens."""
        return self._logprob_sum / self.num_tokens if self.num_tokens else -math.inf

    def push(self, output: TokenOutput) -> Delta | None:
        """Add an output; return what the client may see now, or None."""
        text = ""
        tokens: list[LogprobEntry] = []
        if output.prefill is not None and self._echo is not None:
            text, tokens = self._echo.text, self._echo_entries(self._echo, output.prefill.prompt_logprobs)
        if self._drops_answer and output.token_id is not None:
            reason: FinishReason | None = FinishReason.LENGTH
        else:
            offset = self._characters
            text += self._answer(output)
            reason = FinishReason.STOP if self._stops.found else output.finish_reason
            # Every sampled token, also one that ends the answer and is no part of its text: lm-eval counts them.
            if self._token_bytes is not None and output.logprobs is not None:
                tokens.append(_entry(self._token_bytes, output.logprobs, offset))
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
                text = self._safe(self._detokenizer.push(output.token_id))
        if output.finish_reason is not None:
            text += self._safe(self._detokenizer.finish()) + self._stops.finish()
        return text

    def _safe(self, text: str) -> str:
        self._characters += len(text)
        # Before min_tokens a stop string is plain text, as a stop token is for the engine.
        return text if self.num_tokens <= self._min_tokens else self._stops.push(text)

    def _echo_entries(self, echo: Echo, prompt: Sequence[TokenLogprobs | None] | None) -> list[LogprobEntry]:
        """Entries of the echoed prompt; [] if log-probabilities are not shown."""
        if self._token_bytes is None or prompt is None:
            return []
        offsets = _offsets(echo, self._token_bytes)
        # Nothing predicts the first token, so the engine does not report it.
        first = LogprobEntry(self._token_bytes(echo.token_ids[0]), next(offsets), None, ())
        rest = zip(prompt[1:], offsets, strict=True)
        return [first, *(_entry(self._token_bytes, entry, offset) for entry, offset in rest if entry is not None)]


def _offsets(echo: Echo, token_bytes: TokenBytes) -> Iterator[int]:
    """Characters of the echoed text before each of its tokens.

    A character of several tokens counts once, after the last of them. A special token counts where the prompt spells it
    out, and not where the tokenizer has put it around the prompt.
    """
    offset = 0
    for token_id in echo.token_ids:
        yield offset
        piece = echo.detokenizer.push(token_id)
        if not piece:
            name = token_bytes(token_id).decode(errors="ignore")
            piece = name if echo.text.startswith(name, offset) else ""
        offset += len(piece)


def _entry(token_bytes: TokenBytes, entry: TokenLogprobs, offset: int) -> LogprobEntry:
    top = tuple((token_bytes(token_id), logprob) for token_id, logprob in entry.top)
    return LogprobEntry(token_bytes(entry.token_id), offset, entry.logprob, top)
