"""How much of prompts a step may compute while answers are generated.

A prompt makes the step longer for every answer that shares it. So a step with prompts is to last at most the target of
the inter-token latency (ITL), or three decode steps where that is more. Within that, prompts enter whole and together;
a prompt that takes longer enters chunk by chunk. The bound is on time, not on tokens: what a token of a prompt costs
depends on the model, the machine and the context it attends to, so it is measured.

    step       | decodes | prompts ...............|
               |<- measured ->|<- allowed work × measured seconds per work ->|
               |<---------------- target ITL ------------------------------->|

`Pace` learns from the steps that ran; the arithmetic is pure. No torch, no clock. Sarathi-Serve (Agrawal et al. 2024,
arXiv 2403.02310) chooses one chunk size ahead of time from such a target; here it follows what was measured.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from millstream_runtime.engine.scheduling.prompt_budget import PromptBudget, work
from millstream_runtime.engine.scheduling.scheduler import Chunk
from millstream_runtime.models.config.model_config import ModelConfig

LEAST_RATIO = 3.0  # decode steps that a step with prompts may last, where that is more than the target
DECODE_STEPS_REMEMBERED = 5
MIXED_STEPS_PER_DECODE_STEP = 32  # where a load never pauses: one step in 32 measures decodes
DECAY = 0.8  # of what mixed steps have shown, from one to the next
FIRST_WORK = 64.0  # before anything is known of what it costs
GROWTH_LIMIT = 2.0  # beyond the largest work that was timed: what is only predicted is approached, not jumped at
LEAST_PROMPT_SHARE = 0.05  # of a mixed step's time: a step that seems to have cost nothing was a slow decode before


@dataclass(frozen=True, slots=True)
class StepTime:
    """What one step computed, and how long it took."""

    num_decodes: int
    prompt_work: float  # see `prompt_budget.work`
    seconds: float


def balance_tokens(config: ModelConfig) -> float:
    """Return the context, in tokens, at which attention costs a token as much arithmetic as all linear layers.

    From the shape of a dense layer. Experts and windows have another balance; what this gets wrong, the measured cost
    corrects from one step to the next.
    """
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linear = config.hidden_size * (2 * query + 2 * key_value + 3 * config.intermediate_size)
    return linear / (2 * query)  # scores and values, each one multiplication a token of context and element of a query


def pace_for(target_itl_milliseconds: int | None, before: Pace | None, config: ModelConfig) -> Pace | None:
    """Return the pace of this target, which keeps what the one `before` has learned; None without a target."""
    if target_itl_milliseconds is None:
        return None
    pace = before if before is not None else Pace(balance_tokens(config), target_itl_milliseconds / 1000)
    pace.target_itl_seconds = target_itl_milliseconds / 1000
    return pace


class Pace:
    """Learns how long steps take. `observe` after each, `budget` before each."""

    def __init__(self, balance_tokens: float, target_itl_seconds: float) -> None:
        self._balance_tokens = balance_tokens
        self.target_itl_seconds = target_itl_seconds  # may change at any time: what was learned stays true
        self.reset()

    def reset(self) -> None:
        """Forget the times of the steps so far."""
        self._decode_seconds: deque[float] = deque(maxlen=DECODE_STEPS_REMEMBERED)
        # Sums over mixed steps, older ones less: so a step weighs by the work it had, and what a short prompt costs
        # beyond its tokens says little.
        self._prompt_seconds = self._prompt_work = 0.0
        self._largest_work = 0.0
        self._mixed_steps = 0  # since the last decode step

    def step_time(self, chunks: Iterable[Chunk]) -> StepTime:
        """What a step is about to compute, its seconds still 0."""
        decodes, prompt_work = 0, 0.0
        for sequence, num_tokens in chunks:
            if num_tokens == 1:
                decodes += 1
            else:
                prompt_work += work(num_tokens, sequence.num_computed_tokens, self._balance_tokens)
        return StepTime(decodes, prompt_work, seconds=0.0)

    def observe(self, step: StepTime) -> None:
        """Learn from a step that has run. Steps of prompts alone are ignored: they run at another efficiency."""
        if not step.num_decodes:
            return
        if not step.prompt_work:
            self._decode_seconds.append(step.seconds)
            self._mixed_steps = 0
            return
        self._mixed_steps += 1
        seconds = max(step.seconds - self._decode(), LEAST_PROMPT_SHARE * step.seconds)
        self._prompt_seconds = DECAY * self._prompt_seconds + seconds
        self._prompt_work = DECAY * self._prompt_work + step.prompt_work
        self._largest_work = max(self._largest_work, step.prompt_work)

    def budget(self, max_tokens: int) -> PromptBudget:
        """Return what the next step, if it has decodes or several prompts, may compute of prompts."""
        if self._mixed_steps >= MIXED_STEPS_PER_DECODE_STEP:  # one token of a prompt costs what a decode costs
            return PromptBudget(max_tokens, 1.0, self._balance_tokens, least_tokens=1)
        return PromptBudget(max_tokens, self._allowed_work(), self._balance_tokens)

    def _allowed_work(self) -> float:
        most = max(FIRST_WORK, GROWTH_LIMIT * self._largest_work)
        if not self._prompt_seconds:  # nothing timed, or by a clock too coarse to see a chunk
            return most if not self._prompt_work else math.inf
        decode = self._decode()
        seconds = max(self.target_itl_seconds, LEAST_RATIO * decode) - decode
        return min(most, seconds * self._prompt_work / self._prompt_seconds)

    def _decode(self) -> float:
        """Seconds of a decode step; 0 where none was timed, so that prompts seem to cost more."""
        return statistics.median(self._decode_seconds) if self._decode_seconds else 0.0
