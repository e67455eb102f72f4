"""How much of prompts a step may compute while answers are generated, so that these do not stutter.

A prompt's chunk makes the step longer for every decode that shares it. The bound here is on time, not on tokens: what a
token of a prompt costs depends on the model, the machine and on how much context it attends to, so it is measured.

    allowed work     what fits into (target ratio - 1) decode steps at the measured cost
    most tokens      of a chunk: the allowed work, or where that is too small a chunk to compute well, more tokens, of
                     which a step computes some layers only (see `layered_prefill`)
    layers           of a chunk so chosen, what fits into the step

`Pace` learns from the steps that ran; the arithmetic is pure. No torch, no clock. Sarathi-Serve (Agrawal et al. 2024,
arXiv 2403.02310) chooses one chunk size ahead of time; here it follows what was measured.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from millstream_runtime.models.config.model_config import ModelConfig

# The mean mixed step is to last this many decode steps. The promise is 4 at the 99th percentile: the rest is for noise,
# and where steps are seen to miss their prediction by more than that, the mean gives way, down to LEAST_TARGET_RATIO.
TARGET_RATIO = 3.2
PROMISED_RATIO = 4.0
LEAST_TARGET_RATIO = 1.6  # noise that shorter chunks cannot cure must not keep prompts out
MIXED_STEPS_REMEMBERED = 64
LEAST_MIXED_STEPS = 16  # before their spread means anything
DECODE_STEPS_REMEMBERED = 64
LEAST_PROMPT_TOKENS = 8  # every prompt makes progress
# Fewer queries than this read the keys before them at a worse rate: then a step computes some layers of this many
# tokens rather than all layers of fewer.
EFFICIENT_PROMPT_TOKENS = 16
FIRST_WORK = 32.0  # before anything is known of what it costs
GROWTH_LIMIT = 2.0  # from one mixed step to the next: what is only predicted is approached, not jumped at
SMOOTHING = 0.4  # weight of the newest measurement
LEAST_WORK = 8.0  # what growth begins from, however little the last step had to do
FULL_SLICES = 0.9
TOLERANCE = 0.1  # a chunk that misses the allowed work by so little is computed as if it did not


@dataclass(frozen=True, slots=True)
class StepTime:
    """What one step computed, and how long it took."""

    num_decodes: int
    prompt_work: float  # of prompts, see `work`; of a chunk in slices the share of the layers
    seconds: float
    decode_seconds: float | None = None  # of these, where a step computes its decodes first and measures them


def balance_tokens(config: ModelConfig) -> float:
    """Return the context, in tokens, at which attention costs a token as much arithmetic as all linear layers.

    From the shape of a dense layer. Experts and windows have another balance; what this gets wrong, the measured cost
    corrects from one step to the next.
    """
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linear = config.hidden_size * (2 * query + 2 * key_value + 3 * config.intermediate_size)
    return linear / (2 * query)  # scores and values, each one multiplication a token of context and element of a query


def work(num_tokens: float, context_tokens: int, balance_tokens: float) -> float:
    """Return the cost of a chunk in tokens without context. Each token attends to those before it."""
    return num_tokens * (1 + (context_tokens + num_tokens / 2) / balance_tokens)


def tokens_within(allowed_work: float, context_tokens: int, balance_tokens: float) -> int:
    """Return the most tokens behind `context_tokens` that fit: the positive root of `work(n) = allowed_work`."""
    half = 1 + context_tokens / balance_tokens
    return int(balance_tokens * (math.sqrt(half * half + 2 * allowed_work / balance_tokens) - half))


def evenly(num_layers: int, most: int) -> int:
    """Return layers per slice, at most `most`, so that the last slice of `num_layers` is little smaller than others.

    The most of those that leave no more than a tenth of the slices unused: of 5 layers not 4 (4 and 1), nor 3, but 1.
    """
    return next(one for one in range(most, 0, -1) if num_layers / (one * -(-num_layers // one)) >= FULL_SLICES)


class Pace:
    """Learns how long steps take. `observe` after each; `most_tokens` and `layers` before each that decodes share."""

    def __init__(self, balance_tokens: float, num_layers: int, target_ratio: float = TARGET_RATIO) -> None:
        self._balance_tokens = balance_tokens
        self._num_layers = num_layers
        self._target_ratio = target_ratio
        self._decode_seconds: deque[float] = deque(maxlen=DECODE_STEPS_REMEMBERED)
        self._typical_decode_seconds: float | None = None  # the median of these, until the next is added
        self._decode_seconds_now: float | None = None  # as their contexts have grown since
        self._seconds_per_work: float | None = None
        self._misses: deque[float] = deque(maxlen=MIXED_STEPS_REMEMBERED)  # of mixed steps: seconds over predicted
        self._largest_work = FIRST_WORK

    def observe(self, step: StepTime) -> None:
        """Learn from a step that has run. Steps of prompts alone are ignored: they run at another efficiency."""
        if not step.num_decodes:
            return
        if not step.prompt_work:
            self._decode_seconds.append(step.seconds)
            self._typical_decode_seconds = self._decode_seconds_now = None
            return
        if not self._decode_seconds:
            return
        decode_seconds = self._now() if step.decode_seconds is None else step.decode_seconds
        extra_seconds = max(step.seconds - decode_seconds, 0.05 * step.seconds)
        measured = extra_seconds / step.prompt_work
        known = self._seconds_per_work
        if known is not None:
            self._misses.append(step.seconds / (self._now() + known * step.prompt_work))
        self._seconds_per_work = measured if known is None else known + SMOOTHING * (measured - known)
        self._largest_work = GROWTH_LIMIT * max(step.prompt_work, LEAST_WORK)
        self._decode_seconds_now = self._now() + SMOOTHING * (decode_seconds - self._now())

    def work(self, num_tokens: int, context_tokens: int) -> float:
        """Of a chunk, in tokens without context."""
        return work(num_tokens, context_tokens, self._balance_tokens)

    def most_tokens(self, context_tokens: int) -> int | None:
        """Return how many tokens of prompts the next step, which has decodes, may compute in all or some layers.

        None is no bound: no decode was timed yet. `context_tokens`: computed tokens of the longest of the prompts.
        """
        if not self._decode_seconds:
            return None
        most_layers = self.layers(self.work(EFFICIENT_PROMPT_TOKENS, context_tokens))
        # In a step that computes `most_layers` of its layers, this chunk is the allowed work.
        chunk_work = self._allowed_work() * self._num_layers / evenly(self._num_layers, most_layers)
        return max(LEAST_PROMPT_TOKENS, tokens_within(chunk_work, context_tokens, self._balance_tokens))

    def layers(self, prompt_work: float) -> int:
        """Return how many layers the next step, which has decodes, may compute of chunks of `prompt_work`."""
        if not self._decode_seconds:
            return self._num_layers
        share = (1 + TOLERANCE) * self._allowed_work() / prompt_work
        return max(1, min(self._num_layers, int(share * self._num_layers)))

    def _allowed_work(self) -> float:
        """Work on prompts that fits into the next step."""
        if not self._seconds_per_work:  # a clock too coarse to see a chunk sees no reason to bound it either
            return self._largest_work
        left_seconds = self._mean_ratio() * self._typical() - self._now()
        seconds = max(left_seconds, (LEAST_TARGET_RATIO - 1) * self._now())
        return min(self._largest_work, seconds / self._seconds_per_work)

    def _mean_ratio(self) -> float:
        """Return how many decode steps the mean mixed step may last, so that slow ones keep the promise too.

        The fourth slowest of 64 stands for these: one to three slow steps say nothing about the next.
        """
        if len(self._misses) < LEAST_MIXED_STEPS:
            return self._target_ratio
        slow = sorted(self._misses)[-2 - len(self._misses) // 32]
        return min(self._target_ratio, max(LEAST_TARGET_RATIO, PROMISED_RATIO / slow))

    def _now(self) -> float:
        return self._typical() if self._decode_seconds_now is None else self._decode_seconds_now

    def _typical(self) -> float:
        if self._typical_decode_seconds is None:
            self._typical_decode_seconds = statistics.median(self._decode_seconds)
        return self._typical_decode_seconds
