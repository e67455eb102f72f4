"""Time a few steps at the end of the warm-up: what a planner compares its predictions with.

    one request       decode steps
    a full batch      decode steps of as many requests as run at once; on a CPU at most 16
    a prompt          of up to 2048 tokens (64 on a CPU), from the first step to its first token

The requests are heartbeats with prompts of one token, so a decode step reads all weights and almost no keys. Their
tokens differ, because equal ones would all be routed to the same experts. Of several steps the median counts. All of
them run through the engine's own scheduler, graphs and sampler.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from millstream_runtime.engine.request import Request, SamplingParams, TokenOutput

UNTIMED_STEPS, TIMED_STEPS, LEAST_TIMED_STEPS = 3, 8, 2
MOST_SECONDS = 0.25  # of timed steps; a longer step is timed twice
MOST_SEQUENCES_ON_CPU = 16
MOST_PROMPT_TOKENS, MOST_PROMPT_TOKENS_ON_CPU = 2048, 64
_TOKEN_STRIDE, _REQUEST_STRIDE = 7919, 104_729  # primes, so that tokens and requests differ


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One kind of step. `context_tokens`: of all its sequences together, in the KV cache before it."""

    sequences: int
    new_tokens: int
    context_tokens: int
    step_microseconds: int

    def measured(self) -> dict[str, int]:
        """As `/ready` reports it."""
        return {
            "sequences": self.sequences,
            "new_tokens": self.new_tokens,
            "context_tokens": self.context_tokens,
            "step_microseconds": self.step_microseconds,
        }


def seconds_of_decodes(steps: Iterable[TimedStep]) -> dict[int, float]:
    """Return the times of those that are decode steps, by their number of sequences."""
    return {one.sequences: one.step_microseconds / 1e6 for one in steps if one.sequences == one.new_tokens}


def prompts_of(steps: Iterable[TimedStep]) -> tuple[TimedStep, ...]:
    """Return those that compute a prompt of several tokens."""
    return tuple(one for one in steps if one.new_tokens > one.sequences)


class TimedEngine(Protocol):
    """What is timed."""

    def add_request(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[TokenOutput]: ...
    def has_work(self) -> bool: ...


class StepTimer:
    """`max_requests(num_tokens)`: how many requests of that length run at once; 0 if that is too long."""

    def __init__(
        self,
        engine: TimedEngine,
        max_requests: Callable[[int], int],
        vocab_size: int,
        *,
        on_cpu: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._max_requests, self._vocab_size = engine, max_requests, vocab_size
        self._on_cpu, self._clock = on_cpu, clock

    def run(self, max_prompt_tokens: int) -> tuple[TimedStep, ...]:
        """Time all three, as far as the engine's limits allow."""
        return tuple(self._measure(max_prompt_tokens))

    def _measure(self, max_prompt_tokens: int) -> Iterator[TimedStep]:
        most = self._max_requests(1 + UNTIMED_STEPS + TIMED_STEPS + 2)
        most = min(most, MOST_SEQUENCES_ON_CPU) if self._on_cpu else most
        for sequences in sorted({min(1, most), most} - {0}):
            yield self._decode(sequences)
        length = min(MOST_PROMPT_TOKENS_ON_CPU if self._on_cpu else MOST_PROMPT_TOKENS, max_prompt_tokens)
        if length > 1 and self._max_requests(length + 1):
            self._prefill(length, 0)
            yield TimedStep(1, length, 0, self._prefill(length, 1))

    def _decode(self, sequences: int) -> TimedStep:
        num_tokens = UNTIMED_STEPS + TIMED_STEPS + 2
        requests = [self._request(f"step-time-{number}", 1, num_tokens, number) for number in range(sequences)]
        for request in requests:
            self._engine.add_request(request)
        for _ in range(UNTIMED_STEPS):  # the prompts, and what is recorded or compiled for this number of rows
            self._engine.step()
        seconds: list[float] = []
        while len(seconds) < TIMED_STEPS and (len(seconds) < LEAST_TIMED_STEPS or sum(seconds) < MOST_SECONDS):
            began = self._clock()
            self._engine.step()
            seconds.append(self._clock() - began)
        for request in requests:
            self._engine.abort(request.request_id)
        self._finish()
        context = sequences * (UNTIMED_STEPS + len(seconds) // 2)
        return TimedStep(sequences, sequences, context, _microseconds(statistics.median(seconds)))

    def _prefill(self, length: int, number: int) -> int:
        """Return the microseconds of one prompt that no cache knows."""
        self._engine.add_request(self._request(f"prompt-time-{number}", length, 1, number))
        began = self._clock()
        while self._engine.has_work():
            self._engine.step()
        return _microseconds(self._clock() - began)

    def _finish(self) -> None:
        while self._engine.has_work():
            self._engine.step()

    def _request(self, request_id: str, length: int, max_tokens: int, number: int) -> Request:
        first = (number + 1) * _REQUEST_STRIDE
        prompt = [(first + position * _TOKEN_STRIDE) % self._vocab_size for position in range(length)]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return Request(request_id, prompt, sampling, is_heartbeat=True)


def _microseconds(seconds: float) -> int:
    return max(1, round(seconds * 1_000_000))
