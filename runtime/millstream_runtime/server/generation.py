"""One HTTP request's generations: tokens from the engine become text that is safe to show.

    engine tokens -> Detokenizer (whole characters) -> StopStrings (nothing of a stop string) -> Delta

`close()` aborts in the engine what still runs (client gone, error), so KV blocks are freed within a step; whoever
makes a Generation calls it, because an async generator that was never started runs no `finally`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from millstream_runtime.engine.request import FinishReason, Request, SamplingParams, TokenOutput
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.server.api_errors import engine_failed, internal_error
from millstream_runtime.server.detokenizer import Detokenizer
from millstream_runtime.server.engine_loop import EngineLoop, Mailbox
from millstream_runtime.server.metrics import ServerMetrics
from millstream_runtime.server.stop_strings import StopStrings
from millstream_runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one choice: text that may be shown now, and the reason when it was the last."""

    index: int
    text: str
    finish_reason: FinishReason | None = None


class ChoiceText:
    """Tokens of one choice to text."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self.tokens = 0

    def push(self, output: TokenOutput) -> tuple[str, FinishReason | None]:
        """Text that became safe, and why the choice ended if it did (also when a stop string was found)."""
        text = ""
        if output.token_id is not None:
            self.tokens += 1
            if output.finish_reason is not FinishReason.STOP:  # a stop token itself is not part of the answer
                text = self._safe(self._detokenizer.push(output.token_id))
        if output.finish_reason is not None:
            text += self._safe(self._detokenizer.finish()) + self._stops.finish()
        return text, FinishReason.STOP if self._stops.found else output.finish_reason

    def _safe(self, text: str) -> str:
        # Before min_tokens a stop string is plain text, as a stop token is for the engine.
        return text if self.tokens <= self._min_tokens else self._stops.push(text)


class Generation:
    """Runs `prompts` with one set of sampling parameters; choice i answers prompt i."""

    def __init__(
        self,
        engine_loop: EngineLoop,
        tokenizer: Tokenizer,
        metrics: ServerMetrics,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        stops: Sequence[str],
        arrived_at_seconds: float,
    ) -> None:
        self._engine_loop = engine_loop
        self._metrics = metrics
        self._prompts = prompts
        self._sampling = sampling
        self._arrived_at_seconds = arrived_at_seconds
        self._choices = [ChoiceText(tokenizer.detokenizer(), stops, params.min_tokens) for params in sampling]
        self._last_token_at_seconds: dict[int, float] = {}
        self._running: dict[str, int] = {}  # engine request id -> choice index

    @property
    def usage(self) -> dict[str, int]:
        """OpenAI's usage object."""
        prompt = sum(len(ids) for ids in self._prompts)
        completion = sum(choice.tokens for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """Batches of news, one for each wake-up, until every choice has ended.

        Raises:
            ApiError: the engine stopped, or gave a request up.
        """
        mailbox = Mailbox()
        try:
            for index, (prompt, sampling) in enumerate(zip(self._prompts, self._sampling, strict=True)):
                request_id = uuid.uuid4().hex
                self._running[request_id] = index
                self._engine_loop.submit(Request(request_id, prompt, sampling), mailbox)
            while self._running:
                arrived = await mailbox.take()
                news = [delta for at, output in arrived if (delta := self._accept(at, output)) is not None]
                if news:
                    yield news
        except RuntimeFailure as failure:
            raise engine_failed() from failure
        finally:
            self.close()

    def _accept(self, at_seconds: float, output: TokenOutput) -> Delta | None:
        index = self._running.get(output.request_id)
        if index is None:
            return None  # came after its stop string
        self._observe(index, at_seconds, output)
        text, reason = self._choices[index].push(output)
        if reason is not None:
            del self._running[output.request_id]
            if output.finish_reason is None:
                self._engine_loop.abort(output.request_id)
            self._metrics.finished(reason, at_seconds - self._arrived_at_seconds)
            if reason is FinishReason.ABORT:
                raise internal_error()
        return Delta(index, text, reason) if text or reason is not None else None

    def _observe(self, index: int, at_seconds: float, output: TokenOutput) -> None:
        if output.token_id is None:
            return
        last = self._last_token_at_seconds.get(index)
        self._last_token_at_seconds[index] = at_seconds
        if last is None:
            self._metrics.first_token(at_seconds - self._arrived_at_seconds, len(self._prompts[index]))
        else:
            self._metrics.next_token(at_seconds - last)

    def close(self) -> None:
        """Abort what has not ended. Safe to call twice."""
        now = time.monotonic()
        for request_id in self._running:
            self._engine_loop.abort(request_id)
            self._metrics.finished(FinishReason.ABORT, now - self._arrived_at_seconds)
        self._running.clear()
