"""The steps that an engine runs before the first request, so that no request pays for first-time work.

    every device    a short prompt and its decodes; one of up to 64 tokens: kernels, allocator, weights seen
    its policy      what else the device needs (`DevicePolicy.warm_up`)
    speculation     checks of each number of drafts, and what proposes them

CUDA graphs are recorded elsewhere (`graphs`): they need no requests. What runs here are requests all the same, marked
as heartbeats, through the same scheduler and pool as those of users.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from millstream_runtime.engine.device_policy import DevicePolicy
from millstream_runtime.engine.request import Request, SamplingParams, TokenOutput
from millstream_runtime.errors import FailureReason, RuntimeFailure

LONGEST_PROMPT = 64
# Tokens of the prompt behind which drafts are checked: of one request, and of each of several, which a draft model
# reads with the first draft.
DRAFT_PROMPT, SHORT_DRAFT_PROMPT = 16, 3
CHECKS = 7  # of each length and batch size
TOKENS_OF_ANSWERS = 8  # no vocabulary is smaller
MOST_DRAFTS_SECONDS = 1.0  # where steps are so long that this ends early, first-time work is lost in them


class WarmUpEngine(Protocol):
    """What is warmed up."""

    def add_request(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[TokenOutput]: ...
    def has_work(self) -> bool: ...


class WarmUp:
    """See `device_policy.WarmUpSteps` for what the policy uses of it."""

    def __init__(
        self, engine: WarmUpEngine, max_requests: Callable[[int], int], max_model_len: int, max_step_tokens: int
    ) -> None:
        """`max_requests(num_tokens)`: see `WarmUpSteps`. `max_step_tokens`: of one step."""
        self._engine = engine
        self.max_requests = max_requests
        self._max_model_len = max_model_len
        self.longest_step_tokens = min(max_step_tokens, max_model_len - 1)
        self._num_answers = 0

    def run(self, policy: DevicePolicy, *, is_only_rank: bool) -> None:
        """Run all of it.

        Raises:
            RuntimeFailure: CheckpointInvalid, where the first answer is not a number.
        """
        self._run_prompts()
        policy.warm_up(self, is_only_rank=is_only_rank)
        self._finish()

    def run_drafts(self) -> Callable[[int, int], bool]:
        """Return what computes a few checks, `run(num_requests, num_drafts)`; it returns whether there is time for
        more.

        Each number of drafts is one of rows, for which a CPU writes machine code.
        """
        end = time.perf_counter() + MOST_DRAFTS_SECONDS

        def run(num_requests: int, num_drafts: int) -> bool:
            prompt_tokens = DRAFT_PROMPT if num_requests == 1 else SHORT_DRAFT_PROMPT
            num_tokens = 2 + (CHECKS + 1) * (num_drafts + 1)
            if num_requests <= self.max_requests(prompt_tokens + num_tokens):
                requests = [
                    _request(f"warm-up-drafts-{number}", prompt_tokens, num_tokens) for number in range(num_requests)
                ]
                for one in requests:
                    self._engine.add_request(one)
                for _ in range(1 + CHECKS):
                    self._engine.step()
                for one in requests:
                    self._engine.abort(one.request_id)
                self._finish()
            return time.perf_counter() < end

        return run

    def step(self) -> list[TokenOutput]:
        return self._engine.step()

    def has_work(self) -> bool:
        return self._engine.has_work()

    def answer(self, prompt_tokens: int, samplings: Sequence[SamplingParams]) -> None:
        self._num_answers += 1
        token = self._num_answers % TOKENS_OF_ANSWERS  # another for each call: no prompt begins like one before it
        for number, sampling in enumerate(samplings):
            name = f"warm-up-answer-{self._num_answers}-{number}"
            self._engine.add_request(Request(name, [token] * prompt_tokens, sampling, is_heartbeat=True))
        self._finish()

    @contextmanager
    def decodes(self, max_tokens: list[int]) -> Iterator[None]:
        requests = [_request(f"warm-up-decode-{number}", 1, most) for number, most in enumerate(max_tokens)]
        for request in requests:
            self._engine.add_request(request)
        yield
        for request in requests:
            self._engine.abort(request.request_id)
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

    def _finish(self) -> None:
        while self._engine.has_work():  # what was cancelled may be in flight
            self._engine.step()


def _request(request_id: str, prompt_tokens: int, max_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(request_id, [0] * prompt_tokens, sampling, is_heartbeat=True)
