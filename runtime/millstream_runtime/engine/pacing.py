"""How much of a prompt a step may compute while answers are under way, so that these do not stutter.

A prompt's chunk makes the step longer for every decode that shares it. The bound here is on time, not on tokens: what a
token of a prompt costs depends on the model, the machine and on how much context it attends to, so it is measured.

    limit(context) = the n tokens whose predicted time is (TARGET_RATIO - 1) decode steps

`Pace` learns from the steps that ran; `prompt_tokens_within` is the arithmetic, pure. No torch, no clock. Sarathi-Serve
(Agrawal et al. 2024, arXiv 2403.02310) chooses one chunk size ahead of time; here it follows what was measured.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from millstream_runtime.models.config import ModelConfig

# The mean mixed step is to last this many decode steps. The promise is 4 at the 99th percentile: the rest is for noise,
# and where steps are seen to miss their prediction by more than that, the mean gives way, down to LEAST_TARGET_RATIO.
TARGET_RATIO = 2.5
PROMISED_RATIO = 4.0
LEAST_TARGET_RATIO = 1.6  # noise that shorter chunks cannot cure must not keep prompts out
MIXED_STEPS_REMEMBERED = 64
LEAST_MIXED_STEPS = 16  # before their spread means anything
DECODE_STEPS_REMEMBERED = 64
LEAST_PROMPT_TOKENS = 8  # a prompt goes on, whatever happens
FIRST_PROMPT_TOKENS = 32  # before anything is known of a chunk's cost
GROWTH_LIMIT = 2.0  # from one mixed step to the next: what is only predicted is approached, not jumped at
SMOOTHING = 0.4  # weight of the newest measurement


@dataclass(frozen=True, slots=True)
class StepTime:
    """What one step computed, and how long it took."""

    num_decodes: int
    prompt_tokens: int  # of all chunks of prompts
    context_tokens: int  # before the longest-reaching of these chunks
    seconds: float


def balance_tokens(config: ModelConfig) -> float:
    """The context at which attending costs a token as much arithmetic as all the linear layers.

    From the shape of a dense layer. Experts and windows have another balance; what this gets wrong, the measured cost
    corrects from one step to the next.
    """
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linear = config.hidden_size * (2 * query + 2 * key_value + 3 * config.intermediate_size)
    return linear / (2 * query)  # scores and values, each one multiplication a token of context and element of a query


def work(num_tokens: float, context_tokens: int, balance_tokens: float) -> float:
    """The cost of a chunk, in tokens without context: each attends to what is before it. See `balance_tokens`."""
    return num_tokens * (1 + (context_tokens + num_tokens / 2) / balance_tokens)


def prompt_tokens_within(seconds: float, seconds_per_work: float, context_tokens: int, balance_tokens: float) -> int:
    """The most tokens behind `context_tokens` that `seconds` allow: the positive root of `work(n) = seconds / cost`."""
    half = 1 + context_tokens / balance_tokens
    allowed = seconds / seconds_per_work
    return int(balance_tokens * (math.sqrt(half * half + 2 * allowed / balance_tokens) - half))


class Pace:
    """Learns how long steps take. `observe` after each, `limit` before each that a prompt and a decode may share."""

    def __init__(self, balance_tokens: float, target_ratio: float = TARGET_RATIO) -> None:
        self._balance_tokens = balance_tokens
        self._target_ratio = target_ratio
        self._decode_seconds: deque[float] = deque(maxlen=DECODE_STEPS_REMEMBERED)
        self._typical_decode_seconds: float | None = None  # the median of these, until the next is added
        self._seconds_per_work: float | None = None
        self._misses: deque[float] = deque(maxlen=MIXED_STEPS_REMEMBERED)  # of mixed steps: seconds over predicted
        self._largest = float(FIRST_PROMPT_TOKENS)

    def observe(self, step: StepTime) -> None:
        """A step has run. Steps of prompts alone tell nothing that matters here: they run at another efficiency."""
        if not step.num_decodes:
            return
        if not step.prompt_tokens:
            self._decode_seconds.append(step.seconds)
            self._typical_decode_seconds = None
            return
        if not self._decode_seconds:
            return
        extra_seconds = max(step.seconds - self._typical(), 0.05 * step.seconds)
        done = work(step.prompt_tokens, step.context_tokens, self._balance_tokens)
        measured = extra_seconds / done
        known = self._seconds_per_work
        if known is not None:
            self._misses.append(step.seconds / (self._typical() + known * done))
        self._seconds_per_work = measured if known is None else known + SMOOTHING * (measured - known)
        self._largest = GROWTH_LIMIT * max(step.prompt_tokens, LEAST_PROMPT_TOKENS)

    def limit(self, context_tokens: int) -> int | None:
        """Tokens that prompts may take of the next step, which has decodes; None while no decode was ever timed."""
        if not self._decode_seconds:
            return None
        limit = self._largest
        if self._seconds_per_work:  # a clock too coarse to see a chunk sees no reason to bound it either
            seconds = (self._mean_ratio() - 1) * self._typical()
            limit = min(
                limit, prompt_tokens_within(seconds, self._seconds_per_work, context_tokens, self._balance_tokens)
            )
        return max(LEAST_PROMPT_TOKENS, int(limit))

    def _mean_ratio(self) -> float:
        """What the mean step may last so that the slow ones keep the promise too.

        The fourth slowest of 64 speaks for these: one slow step, or three, say nothing about the next.
        """
        if len(self._misses) < LEAST_MIXED_STEPS:
            return self._target_ratio
        slow = sorted(self._misses)[-2 - len(self._misses) // 32]
        return min(self._target_ratio, max(LEAST_TARGET_RATIO, PROMISED_RATIO / slow))

    def _typical(self) -> float:
        if self._typical_decode_seconds is None:
            self._typical_decode_seconds = statistics.median(self._decode_seconds)
        return self._typical_decode_seconds
