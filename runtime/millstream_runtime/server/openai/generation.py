"""One HTTP request's generations: tokens from the engine become text that is safe to show.

    engine tokens -> Detokenizer (whole characters) -> StopStrings (nothing of a stop string) -> Delta

`close()` aborts in the engine what still runs (client gone, error), so KV blocks are freed within a step; whoever
makes a Generation calls it, because an async generator that was never started runs no `finally`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

from millstream_runtime.engine.request import FinishReason, Request, SamplingParams, TokenLogprobs, TokenOutput
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.server.engine.client import EngineClient
from millstream_runtime.server.engine.output_queue import Mailbox
from millstream_runtime.server.http import limits
from millstream_runtime.server.http.api_errors import engine_failed, internal_error
from millstream_runtime.server.http.disconnect import ClientGoneError
from millstream_runtime.server.openai.choice import Choice, Delta, Echo
from millstream_runtime.server.operations.metrics import RequestTimes, ServerMetrics
from millstream_runtime.tokenizing.tokenizer import Tokenizer

_serial_numbers = itertools.count(1)  # of this process's generations; no client sees them


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """What is to be generated: `num_candidates` answers for each prompt, of which the `num_shown` best count.

    Choice `i` is the candidate `i % num_candidates` of prompt `i // num_candidates`.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sequence[SamplingParams]  # one a prompt
    num_candidates: int = 1
    num_shown: int = 1
    stops: Sequence[str] = ()
    echoes: Sequence[str] = ()  # the prompts' texts, to be shown before the answers; () shows none
    shows_logprobs: bool = False
    shows_prompt_logprobs: bool = False
    drops_answer: bool = False  # only the prompt is to be scored
    priority: int = 0
    cache_salt: str = ""

    def sampling_of(self, choice: int) -> SamplingParams:
        """Candidates of one prompt differ by their seed."""
        params = self.sampling[choice // self.num_candidates]
        candidate = choice % self.num_candidates
        if params.seed is None or candidate == 0:
            return params
        return replace(params, seed=params.seed + candidate)


@dataclass(slots=True)
class _Progress:
    """What the server knows of one choice while it runs."""

    choice: Choice
    times: RequestTimes
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    prompt_logprobs: Sequence[TokenLogprobs | None] = field(default_factory=tuple)


class Generation:
    """Runs a GenerationPlan on the engine."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        metrics: ServerMetrics,
        plan: GenerationPlan,
        arrived_at_seconds: float,
    ) -> None:
        self.plan = plan
        self.spell = tokenizer.token_bytes
        self._engine = engine
        self._metrics = metrics
        self._tokenizer = tokenizer
        self._arrived_at_seconds = arrived_at_seconds
        self._begun: list[_Progress] = []
        self._running: dict[str, int] = {}  # engine request id -> choice index
        self._mailbox: Mailbox | None = None
        self._client_gone = False

    @property
    def _progress(self) -> list[_Progress]:
        """One a choice. Made when it is first asked for: the engine need not wait until it is."""
        if not self._begun:
            self._begun = [self._begin(index) for index in range(self.num_choices)]
        return self._begun

    def _begin(self, index: int) -> _Progress:
        plan, prompt = self.plan, index // self.plan.num_candidates
        params = plan.sampling_of(index)
        choice = Choice(
            index,
            self._tokenizer.detokenizer(),
            plan.stops,
            params.min_tokens,
            echo=Echo(plan.echoes[prompt], plan.prompts[prompt][0]) if plan.echoes else None,
            spell=self.spell if plan.shows_logprobs else None,
            drops_answer=plan.drops_answer,
        )
        return _Progress(choice, RequestTimes(self._arrived_at_seconds, len(plan.prompts[prompt]), params.max_tokens))

    @property
    def num_choices(self) -> int:
        """Of all candidates."""
        return len(self.plan.prompts) * self.plan.num_candidates

    @property
    def record(self) -> list[tuple[RequestTimes, FinishReason | None]]:
        """The life of each choice: moments and counts, no text."""
        return [(one.times, one.finish_reason) for one in self._progress]

    @property
    def usage(self) -> dict[str, object]:
        """OpenAI's usage object. A prompt counts once, however many answers it has; every candidate counts."""
        prompt = sum(len(ids) for ids in self.plan.prompts)
        completion = sum(one.choice.num_tokens for one in self._progress)
        cached = sum(one.cached_tokens for one in self._progress[:: self.plan.num_candidates])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @property
    def has_ended(self) -> bool:
        """Once `deltas` has begun: there will be no more of them."""
        return not self._running

    def shown_choices(self) -> list[int]:
        """Of each prompt the candidates with the highest log-probability a token, best first; all if all are shown."""
        count, shown = self.plan.num_candidates, self.plan.num_shown
        groups = [list(range(start, start + count)) for start in range(0, self.num_choices, count)]
        if shown < count:
            groups = [sorted(one, key=lambda i: -self._progress[i].choice.mean_logprob)[:shown] for one in groups]
        return [index for group in groups for index in group]

    def prompt_logprobs(self, index: int) -> Sequence[TokenLogprobs | None] | None:
        """One entry a token of the choice's prompt, when they were asked for."""
        return self._progress[index].prompt_logprobs if self.plan.shows_prompt_logprobs else None

    async def deltas(self, tokens_a_wake: int = 1) -> AsyncGenerator[list[Delta], None]:
        """Batches of news, one a wake-up, until every choice has ended.

        With a wake-up for each token, also [] after SSE_KEEP_ALIVE_SECONDS of silence. Where stop strings are looked
        for, every token is looked at when it comes, or the engine would work past the end of the answer.

        Raises:
            ApiError: the engine stopped, or gave a request up.
            ClientGoneError: `client_gone` was called.
        """
        mailbox = self._mailbox = Mailbox(1 if self.plan.stops else tokens_a_wake)
        if self._client_gone:
            mailbox.fail(ClientGoneError())
        try:
            for index in range(self.num_choices):
                self._submit(index, mailbox)
            _ = self._progress  # now, while the engine works
            while self._running:
                arrived = await mailbox.take(limits.SSE_KEEP_ALIVE_SECONDS if tokens_a_wake == 1 else None)
                news = [delta for at, output in arrived if (delta := self._accept(at, output)) is not None]
                if self.has_ended:
                    self._metrics.answered([one.choice.num_tokens for one in self._progress])
                if news or not arrived:
                    yield news
        except RuntimeFailure as failure:
            raise engine_failed() from failure
        finally:
            self.close()

    def client_gone(self) -> None:
        """Nobody waits for the answer any more: `deltas` ends with an error, and the engine is told at once."""
        self._client_gone = True
        if self._mailbox is not None:
            self._mailbox.fail(ClientGoneError())

    def close(self) -> None:
        """Abort what has not ended. Safe to call twice."""
        now = time.monotonic()
        for request_id, index in self._running.items():
            self._engine.abort(request_id)
            self._finish(self._progress[index], FinishReason.ABORT, now)
        self._running.clear()
        if self._mailbox is not None:
            self._mailbox.close()

    def _submit(self, index: int, mailbox: Mailbox) -> None:
        plan, request_id = self.plan, f"{next(_serial_numbers)}"
        self._running[request_id] = index
        request = Request(
            request_id,
            plan.prompts[index // plan.num_candidates],
            plan.sampling_of(index),
            priority=plan.priority,
            cache_salt=plan.cache_salt,
        )
        self._engine.submit(request, mailbox)

    def _accept(self, at_seconds: float, output: TokenOutput) -> Delta | None:
        index = self._running.get(output.request_id)
        if index is None:
            return None  # came after its stop string
        progress = self._progress[index]
        self._observe(progress, at_seconds, output)
        delta = progress.choice.push(output)
        if delta is not None and delta.finish_reason is not None:
            del self._running[output.request_id]
            if output.finish_reason is None:
                self._engine.abort(output.request_id)
            self._finish(progress, delta.finish_reason, at_seconds)
            if delta.finish_reason is FinishReason.ABORT:
                raise internal_error()
        return delta

    def _finish(self, progress: _Progress, reason: FinishReason, at_seconds: float) -> None:
        progress.finish_reason = reason
        self._metrics.finished(reason, progress.times, at_seconds)

    def _observe(self, progress: _Progress, at_seconds: float, output: TokenOutput) -> None:
        if output.token_id is None:
            return
        if output.prefill is not None:
            progress.cached_tokens = output.prefill.num_cached_tokens
            progress.prompt_logprobs = output.prefill.prompt_logprobs or ()
            self._metrics.first_token(progress.times, at_seconds, output.prefill)
        else:
            self._metrics.next_token(progress.times, at_seconds)
