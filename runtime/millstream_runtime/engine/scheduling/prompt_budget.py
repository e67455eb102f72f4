"""How a step divides what it may compute among prompts: short ones do not wait for a long one, nor it for them.

A prompt is long in a step if it takes more than half of what the step may compute of prompts. Short prompts enter in
order, whole and together. Long ones are computed in order, chunk by chunk. Where there are both, each side has half of
the budget, and what it does not need goes to the other:

    budget   | short prompts, in order ->   |            <- long prompts, in order |
             |<--------- half -------------->|<------------ half ----------------->|

So a prompt waits for no more than the prompts of its own kind before it, at half of the budget per step: an endless
stream of short prompts does not starve a long one. Pure: no torch, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

from millstream_runtime.engine.scheduling.sequence import Sequence

LEAST_PROMPT_TOKENS = 16  # every prompt makes progress; fewer queries than this read the keys before them inefficiently


class PromptNeed(NamedTuple):
    """A prompt, or what is left of it: `num_tokens` uncomputed tokens behind `context_tokens` computed ones."""

    sequence: Sequence
    num_tokens: int
    context_tokens: int


class StepLoad(NamedTuple):
    """What a step that prompts share has to do: so many decodes, so many prompts, in at most so many tokens more."""

    max_tokens: int
    num_decodes: int = 0
    num_prompts: int = 1  # under way or waiting


@dataclass(frozen=True, slots=True)
class PromptBudget:
    """What a step may compute of prompts: at most `tokens`, and at most `work`, which stands for time.

    `work` is counted in tokens without context. `balance_tokens`: the context at which attention costs a token as much
    as everything else. `least_tokens`: of the first prompt of each kind, whatever they cost.
    """

    tokens: int
    work: float = math.inf
    balance_tokens: float = math.inf
    least_tokens: int = LEAST_PROMPT_TOKENS

    def cost(self, num_tokens: int, context_tokens: int) -> float:
        """Work of a chunk."""
        return work(num_tokens, context_tokens, self.balance_tokens)

    def tokens_behind(self, context_tokens: int) -> int:
        """The most tokens of a prompt behind `context_tokens` that fit."""
        if math.isinf(self.work):
            return self.tokens
        return min(self.tokens, tokens_within(self.work, context_tokens, self.balance_tokens))

    def is_long(self, need: PromptNeed) -> bool:
        """Whether a prompt takes more than half."""
        half = self.half()
        return need.num_tokens > half.tokens or self.cost(need.num_tokens, need.context_tokens) > half.work

    def half(self) -> PromptBudget:
        """Half of it, rounded down."""
        return replace(self, tokens=self.tokens // 2, work=self.work / 2)

    def without(self, num_tokens: int, cost: float) -> PromptBudget:
        """What is left behind a chunk."""
        return replace(self, tokens=self.tokens - num_tokens, work=max(0.0, self.work - cost))


def work(num_tokens: float, context_tokens: int, balance_tokens: float) -> float:
    """Return the cost of a chunk in tokens without context. Each token attends to those before it."""
    return num_tokens * (1 + (context_tokens + num_tokens / 2) / balance_tokens)


def tokens_within(allowed_work: float, context_tokens: int, balance_tokens: float) -> int:
    """Return the most tokens behind `context_tokens` that fit: the positive root of `work(n) = allowed_work`."""
    if math.isinf(balance_tokens):
        return int(allowed_work)
    half = 1 + context_tokens / balance_tokens
    return int(balance_tokens * (math.sqrt(half * half + 2 * allowed_work / balance_tokens) - half))


def divide(budget: PromptBudget, needs: Seq[PromptNeed]) -> dict[Sequence, int]:
    """Return how many tokens of which prompts a step computes; `needs` are in order. Prompts without any are left
    out."""
    long = [need for need in needs if budget.is_long(need)]
    short = [need for need in needs if not budget.is_long(need)]
    chunks: dict[Sequence, int] = {}
    least_tokens = budget.least_tokens
    if not long or not short:
        _spend(budget, budget, needs, chunks, least_tokens)
        return chunks
    left = _spend(budget, budget.half(), short, chunks, least_tokens)
    left = _spend(left, left, long, chunks, least_tokens)
    _spend(left, left, short, chunks)
    return chunks


def _spend(
    budget: PromptBudget,
    share: PromptBudget,
    needs: Iterable[PromptNeed],
    chunks: dict[Sequence, int],
    least_tokens: int = 0,
) -> PromptBudget:
    """Add to `chunks` what fits into `share`, in order and without overtaking; of the first prompt `least_tokens`.

    Returns what is left of `budget`.
    """
    for sequence, num_tokens, context_tokens in needs:
        planned = chunks.get(sequence, 0)
        missing, context = num_tokens - planned, context_tokens + planned
        if not missing:
            continue
        taken = min(missing, max(share.tokens_behind(context), min(least_tokens, share.tokens)))
        least_tokens = 0
        if taken:
            chunks[sequence] = planned + taken
            cost = share.cost(taken, context)
            share, budget = share.without(taken, cost), budget.without(taken, cost)
        if taken < missing:
            break
    return budget
