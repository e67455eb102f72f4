"""One HTTP request's generations: tokens from the engine become text that is safe to show.

    submit() ─► engine ─► tokens ─► Detokenizer (whole characters) ─► StopStrings (no part of a stop string) ─► Delta

The creator of a Generation calls `submit`, reads `deltas`, and always calls `close`, which aborts in the engine what
still runs (client disconnected, error) and so frees its KV blocks within a step. `deltas` cannot do that alone: an
async generator that was never started runs no `finally`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from millstream_runtime.engine.request import (
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.rust_panics import RustPanic
from millstream_runtime.server.engine.client import EngineClient, RequestRefused
from millstream_runtime.server.engine.output_queue import OutputQueue
from millstream_runtime.server.http import limits
from millstream_runtime.server.http.api_errors import (
    ApiError,
    engine_failed,
    internal_error,
    out_of_memory,
    tokenizer_failed,
)
from millstream_runtime.server.http.disconnect import ClientDisconnectedError
from millstream_runtime.server.openai.choice import Choice, Delta
from millstream_runtime.server.openai.echo import Echo
from millstream_runtime.server.operations.answered_requests import AnswerTokens
from millstream_runtime.server.operations.metrics import RequestTimes, ServerMetrics
from millstream_runtime.tokenizing.tokenizer import Tokenizer

# The task that collects a complete response need not wake for every token.
TOKENS_PER_WAKEUP = 16

# To free the log-probabilities of a prompt of 8,192 tokens with 20 alternatives takes 15 ms.
ENTRIES_FREED_PER_TURN = 256

GIVEN_UP = "The engine gave the request up."

_serial_numbers = itertools.count(1)  # of this process's generations; never sent to a client


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """What to generate: `num_candidates` answers per prompt, of which the `num_shown` best are returned.

    Choice `i` is the candidate `i % num_candidates` of prompt `i // num_candidates`.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sequence[SamplingParams]  # one per prompt
    num_candidates: int = 1
    num_shown: int = 1
    stops: Sequence[str] = ()
    echoes: Sequence[str] = ()  # the prompts' texts, returned before the answers; () for none
    shows_logprobs: bool = False
    shows_prompt_logprobs: bool = False
    drops_answer: bool = False  # only score the prompt
    shows_every_token: bool = False  # make a delta also for a token without text
    priority: int = 0
    cache_salt: str = ""
    client: str = ""  # whose request it is: see `engine.request`
    client_ranks_above: bool = False  # likewise

    def sampling_of(self, choice: int) -> SamplingParams:
        """The parameters of one choice; candidates of one prompt differ by their seed."""
        params = self.sampling[choice // self.num_candidates]
        candidate = choice % self.num_candidates
        if params.seed is None or candidate == 0:
            return params
        return replace(params, seed=params.seed + candidate)


@dataclass(slots=True)
class _ChoiceState:
    """One choice while it runs."""

    choice: Choice
    times: RequestTimes
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    prompt_logprobs: Sequence[TokenLogprobs | None] = field(default_factory=tuple)


class Generation:
    """Runs a GenerationPlan on the engine: `submit`, then `deltas`, then `close`."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        metrics: ServerMetrics,
        plan: GenerationPlan,
        arrived_at_seconds: float,
    ) -> None:
        self.plan = plan
        self.token_bytes = tokenizer.token_bytes
        self._engine = engine
        self._metrics = metrics
        self._tokenizer = tokenizer
        self._arrived_at_seconds = arrived_at_seconds
        self._states: list[_ChoiceState] = []  # one per choice, once submitted
        self._running: dict[str, int] = {}  # engine request id -> choice index
        self._queue = OutputQueue()
        self._keep_alive_seconds: float | None = None
        self._engine_failed = False
        self._on_ended: Callable[[AnswerTokens | None], None] | None = None

    def submit(
        self,
        *,
        streams: bool,
        on_choice_ended: Callable[[], None] = lambda: None,
        on_ended: Callable[[AnswerTokens | None], None] | None = None,
    ) -> None:
        """Queue the requests of all choices in the engine.

        `streams`: wake for every token, and send keep-alives. Where stop strings are searched, each token is read when
        it arrives anyway, or the engine would compute past the end of the answer. `on_choice_ended`: called when the
        engine is done with a choice, which may be long before the client has read it. `on_ended`: called once, when all
        of them are complete or given up, with what `answer_tokens` says.

        Raises:
            ApiError: the engine stopped.
        """
        self._queue = OutputQueue(
            1 if streams or self.plan.stops else TOKENS_PER_WAKEUP, on_generation_ended=on_choice_ended
        )
        self._keep_alive_seconds = limits.SSE_KEEP_ALIVE_SECONDS if streams else None
        self._on_ended = on_ended
        try:
            for index in range(self.num_choices):
                self._submit_choice(index)
        except RuntimeFailure as failure:
            self._engine_failed = True
            raise engine_failed() from failure
        finally:  # after the requests are sent: the engine need not wait for it
            self._states = [self._new_state(index) for index in range(self.num_choices)]

    def _new_state(self, index: int) -> _ChoiceState:
        plan, prompt = self.plan, index // self.plan.num_candidates
        params = plan.sampling_of(index)
        choice = Choice(
            index,
            self._tokenizer.detokenizer(),
            plan.stops,
            params.min_tokens,
            echo=self._echo(prompt),
            token_bytes=self.token_bytes if plan.shows_logprobs else None,
            drops_answer=plan.drops_answer,
            shows_every_token=plan.shows_every_token,
        )
        return _ChoiceState(
            choice, RequestTimes(self._arrived_at_seconds, len(plan.prompts[prompt]), params.max_tokens)
        )

    def _echo(self, prompt: int) -> Echo | None:
        plan = self.plan
        return Echo(plan.echoes[prompt], plan.prompts[prompt], self._tokenizer.detokenizer()) if plan.echoes else None

    @property
    def num_choices(self) -> int:
        """The number of candidates of all prompts."""
        return len(self.plan.prompts) * self.plan.num_candidates

    @property
    def record(self) -> list[tuple[RequestTimes, FinishReason | None]]:
        """Times and counts of each choice, and how it ended; no text."""
        return [(state.times, state.finish_reason) for state in self._states]

    @property
    def usage(self) -> dict[str, object]:
        """OpenAI's usage object. A prompt counts once, however many answers it has; every candidate counts."""
        return self.usage_with(sum(state.choice.num_tokens for state in self._states))

    def usage_with(self, completion: int) -> dict[str, object]:
        """The same after `completion` tokens, which may be fewer than have arrived."""
        prompt = sum(len(ids) for ids in self.plan.prompts)
        cached = sum(state.cached_tokens for state in self._states[:: self.plan.num_candidates])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @property
    def answer_tokens(self) -> AnswerTokens | None:
        """What `usage` says, of the prompts that were computed, and the time to the first token; None: none was, or
        the engine is gone. A client that left may have left before the last of them."""
        computed = [one for one in self._states if one.times.first_token_at_seconds is not None]
        firsts = self._states[:: self.plan.num_candidates]
        prompts = [one for one in firsts if one.times.first_token_at_seconds is not None]
        if not prompts or self._engine_failed:
            return None
        first_at_seconds = min(one.times.first_token_at_seconds or 0.0 for one in computed)
        return AnswerTokens(
            sum(one.times.num_prompt_tokens for one in prompts),
            sum(one.cached_tokens for one in prompts),
            sum(one.choice.num_tokens for one in computed),
            first_at_seconds - self._arrived_at_seconds,
        )

    @property
    def has_ended(self) -> bool:
        """Whether all choices have ended; only meaningful after `submit`."""
        return not self._running

    def shown_choices(self) -> list[int]:
        """Per prompt the candidates with the highest mean log-probability, best first; all if all are shown."""
        count, shown = self.plan.num_candidates, self.plan.num_shown
        groups = [list(range(start, start + count)) for start in range(0, self.num_choices, count)]
        if shown < count:
            groups = [sorted(one, key=lambda i: -self._states[i].choice.mean_logprob)[:shown] for one in groups]
        return [index for group in groups for index in group]

    def prompt_logprobs(self, index: int) -> Sequence[TokenLogprobs | None] | None:
        """One entry per token of the choice's prompt; None if not requested."""
        return self._states[index].prompt_logprobs if self.plan.shows_prompt_logprobs else None

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """Yield batches of deltas, one per wake-up, until every choice has ended.

        A long echo with log-probabilities comes in parts, with a turn for all other clients behind each.

        A stream also yields [] after SSE_KEEP_ALIVE_SECONDS without a token, and after `keep_alive`.

        Raises:
            ApiError: the engine stopped, or refused a request, or gave it up; or the tokenizer fails on the answer.
            ClientDisconnectedError: `cancel` was called.
        """
        try:
            while self._running:
                arrived = await self._queue.get(self._keep_alive_seconds)
                deltas = []
                for at, output in arrived:
                    for part in self._echo_parts(output):
                        yield [part]
                        await asyncio.sleep(0)
                    if (delta := self._accept(at, output)) is not None:
                        deltas.append(delta)
                if self.has_ended:
                    self._metrics.answered([state.choice.num_tokens for state in self._states])
                    self._report_end()
                if deltas or not arrived:
                    yield deltas
        except RuntimeFailure as failure:
            self._engine_failed = True
            raise _answer_to(failure) from failure
        finally:
            self._abort_unfinished()

    def keep_alive(self) -> None:
        """Make `deltas` yield [] now, as if no token had come for long."""
        self._queue.wake()

    def cancel(self) -> None:
        """End `deltas` with an error, because the client disconnected; the engine stops at once."""
        self._queue.fail(ClientDisconnectedError())

    def close(self) -> None:
        """Abort what has not ended, and free what was known of the prompts. Safe to call twice."""
        self._abort_unfinished()
        for state in self._states:
            free_in_turns([*state.prompt_logprobs])
            state.prompt_logprobs = ()

    def _abort_unfinished(self) -> None:
        now = time.monotonic()
        unfinished = FinishReason.ERROR if self._engine_failed else FinishReason.ABORT
        for request_id, index in self._running.items():
            self._engine.abort(request_id)
            self._metrics.ended_waiting(self.plan.client, request_id)
            self._finish(self._states[index], unfinished, now)
        self._running.clear()
        self._queue.close()
        self._report_end()

    def _report_end(self) -> None:
        if self._on_ended is not None:
            on_ended, self._on_ended = self._on_ended, None
            on_ended(self.answer_tokens)

    def _submit_choice(self, index: int) -> None:
        plan, request_id = self.plan, f"{next(_serial_numbers)}"
        self._running[request_id] = index
        request = Request(
            request_id,
            plan.prompts[index // plan.num_candidates],
            plan.sampling_of(index),
            priority=plan.priority,
            cache_salt=plan.cache_salt,
            client=plan.client,
            client_ranks_above=plan.client_ranks_above,
        )
        self._metrics.began_to_wait(plan.client, request_id, self._arrived_at_seconds)
        self._engine.submit(request, self._queue)

    def _echo_parts(self, output: TokenOutput) -> Iterator[Delta]:
        index = self._running.get(output.request_id)
        if index is None or output.prefill is None:
            return iter(())
        return self._states[index].choice.echo_parts(output.prefill)

    def _accept(self, at_seconds: float, output: TokenOutput) -> Delta | None:
        index = self._running.get(output.request_id)
        if index is None:
            return None  # arrived after its stop string
        state = self._states[index]
        self._observe(state, at_seconds, output)
        delta = state.choice.push(output)
        if delta is not None and delta.finish_reason is not None:
            del self._running[output.request_id]
            if output.finish_reason is None:
                self._engine.abort(output.request_id)
            if delta.finish_reason is FinishReason.ERROR:
                self._finish(state, FinishReason.ERROR, at_seconds)
                if output.error is RequestError.OUT_OF_MEMORY:
                    raise out_of_memory() from RuntimeFailure(FailureReason.OUT_OF_MEMORY, output.error)
                raise internal_error() from RuntimeFailure(FailureReason.RUNTIME_CRASHED, output.error or GIVEN_UP)
            self._finish(state, delta.finish_reason, at_seconds)
        return delta

    def _finish(self, state: _ChoiceState, reason: FinishReason, at_seconds: float) -> None:
        state.finish_reason = reason
        self._metrics.finished(reason, state.times, at_seconds)

    def _observe(self, state: _ChoiceState, at_seconds: float, output: TokenOutput) -> None:
        if output.token_id is None or output.prefill is not None:
            self._metrics.ended_waiting(self.plan.client, output.request_id)
        if output.token_id is None:
            return
        if output.prefill is not None:
            state.cached_tokens = output.prefill.num_cached_tokens
            state.prompt_logprobs = output.prefill.prompt_logprobs or ()
            self._metrics.first_token(state.times, at_seconds, output.prefill)
        else:
            self._metrics.next_token(state.times, at_seconds)


def _answer_to(failure: RuntimeFailure) -> ApiError:
    if isinstance(failure, RustPanic):
        return tokenizer_failed()
    return internal_error() if isinstance(failure, RequestRefused) else engine_failed()


def free_in_turns(entries: list[TokenLogprobs | None]) -> None:
    """Empty the list, the last entries first: a part now, and one in each further iteration of the event loop."""
    del entries[-ENTRIES_FREED_PER_TURN:]
    if entries:
        asyncio.get_running_loop().call_soon(free_in_turns, entries)
