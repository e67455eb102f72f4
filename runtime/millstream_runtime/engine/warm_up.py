"""The steps that an engine runs before the first request, so that no request pays for first-time work.

    every device    a short prompt and its decodes; one of up to 64 tokens: kernels, allocator, weights seen
    CPU, one rank   decodes timed on fewer and on all threads (`threads`)
    CPU             decodes of every number of requests: oneDNN writes machine code for each number of rows
                    (`models.two_layouts`)

CUDA graphs are recorded elsewhere (`graphs`): they need no requests. What runs here are requests all the same, marked
as heartbeats, through the same scheduler and pool as those of users.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from millstream_runtime.engine.cpu import threads
from millstream_runtime.engine.execution.model_runner import ModelRunner
from millstream_runtime.engine.request import Request, SamplingParams, TokenOutput
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.logs import log

LONGEST_PROMPT = 64
MOST_DECODES = 16
MOST_DECODES_SECONDS = 1.0  # where steps are so long that this ends early, first-time work is lost in them


class WarmUpEngine(Protocol):
    """What is warmed up."""

    def add_request(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[TokenOutput]: ...
    def has_work(self) -> bool: ...


class WarmUp:
    """`requests_of(num_tokens)`: how many requests of that length, prompt included, the engine can run at once; 0 for
    one that is longer than it allows."""

    def __init__(
        self, engine: WarmUpEngine, runner: ModelRunner, requests_of: Callable[[int], int], max_model_len: int
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._requests_of = requests_of
        self._max_model_len = max_model_len

    def run(self, *, alone: bool) -> None:
        """All of it. `alone`: this rank is the only one, so that its threads are its own to choose.

        Raises:
            RuntimeFailure: CheckpointInvalid, where the first answer is not a number.
        """
        self._run_prompts()
        if self._runner.is_on_cpu:
            if alone and self._runner.threads.all_threads > 1:
                self._choose_threads()
            self._run_decodes_of_every_number()
        self._finish()

    def _run_prompts(self) -> None:
        longest = min(LONGEST_PROMPT, self._max_model_len - 3)
        for length in {1, max(1, longest)}:
            self._engine.add_request(_request(f"warm-up-{length}", length, 3))
        while self._engine.has_work():
            if any(output.token_id is None for output in self._engine.step()):
                raise RuntimeFailure(
                    FailureReason.CHECKPOINT_INVALID,
                    "The model's first answer is not a number (NaN): its weights are damaged.",
                )

    def _choose_threads(self) -> None:
        """Choose the threads of each kind of step by running decodes of that size, where the pool has room for them."""
        all_threads = self._runner.threads.all_threads
        num_tokens = threads.most_steps(all_threads) + 2
        room = self._requests_of(num_tokens + 1)
        if not room:
            return
        limits = []
        self._runner.threads = threads.Threads(all_threads, being_measured=True)
        for most_tokens, wanted in threads.MEASURED_TOKENS.items():
            with self._decodes([num_tokens] * min(wanted, room)):
                self._engine.step()
                seconds = threads.measure(self._engine.step, all_threads)
            limits.append((most_tokens, threads.choose(seconds, all_threads)))
        self._runner.threads = threads.Threads(all_threads, tuple(limits))
        log.info("threads_chosen", threads=self._runner.threads.describe())

    def _run_decodes_of_every_number(self) -> None:
        """Requests of which one ends at each step: 16 decodes, 15, 14, ..., 1."""
        end = time.perf_counter() + MOST_DECODES_SECONDS
        room = self._requests_of(MOST_DECODES + 2)
        with self._decodes([2 + number for number in range(min(MOST_DECODES, room))]):
            while self._engine.has_work() and time.perf_counter() < end:
                self._engine.step()

    @contextmanager
    def _decodes(self, max_tokens: list[int]) -> Iterator[None]:
        """Requests of so many tokens each behind a prompt of one; cancelled at the end."""
        requests = [_request(f"warm-up-decode-{number}", 1, most) for number, most in enumerate(max_tokens)]
        for request in requests:
            self._engine.add_request(request)
        yield
        for request in requests:
            self._engine.abort(request.request_id)
        self._finish()

    def _finish(self) -> None:
        while self._engine.has_work():  # what was cancelled may be in flight
            self._engine.step()


def _request(request_id: str, prompt_tokens: int, max_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(request_id, [0] * prompt_tokens, sampling, is_heartbeat=True)
