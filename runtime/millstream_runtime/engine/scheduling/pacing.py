"""How much of prompts a step may compute while answers are generated.

A prompt makes the step longer for every answer that shares it. So a step with prompts is to last at most the target of
the inter-token latency (ITL), or three decode steps where that is more. Within that, prompts enter whole and together;
a prompt that takes longer enters chunk by chunk. The bound is on time, not on tokens: what a token of a prompt costs
depends on the model, the machine and the context it attends to, so it is measured.

Where the target is a default and several prompts wait, the bound grows with the prompts per answer, up to 16 decode
steps and a quarter of a second: in a burst few answers wait a little, and many first tokens come sooner. A large model,
whose decode steps are slow, keeps to about three of them.

A step of prompts alone makes no answer wait, but whoever comes meanwhile: it has the same bound, by what such steps
take themselves. They compute at another efficiency than prompts beside decodes.

    step       | decodes | prompts ...............|
               |<- measured ->|<- allowed work × measured seconds per work ->|
               |<---------------- target ITL ------------------------------->|

`Pace` learns from the steps that ran; the arithmetic is pure. No torch, no clock. Sarathi-Serve (Agrawal et al. 2024,
arXiv 2403.02310) chooses one chunk size ahead of time from such a target; here it follows what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from millstream_runtime.engine.request import PromptPace
from millstream_runtime.engine.scheduling.decode_times import DecodeTimes
from millstream_runtime.engine.scheduling.prompt_budget import PromptBudget, StepLoad, work
from millstream_runtime.engine.scheduling.step_plan import Chunk
from millstream_runtime.models.config.model_config import ModelConfig

LEAST_RATIO = 3.0  # decode steps that a step with prompts may last, where that is more than the target
MOST_RATIO = 16.0  # the same while several prompts wait and the target is a default
CROWD_GROWTH = 3.0  # of the bound, by a waiting prompt per answer
MOST_CROWD_SECONDS = 0.25  # of such a step, unless LEAST_RATIO allows more: a gap that a reader hardly notices
MIXED_STEPS_PER_DECODE_STEP = 32  # where a load never pauses: one step in 32 measures decodes
MIXED_STEPS_THAT_AGE_DECODES = 4  # so many at least between two decode steps that are there to be timed
DOUBTFUL_CHANGE = 1.5  # of what prompts seem to cost, since decodes were last timed
MOST_OF_EXPECTED = 2.0  # seconds of a step of prompts alone that are believed
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


@dataclass(slots=True)
class _PromptSteps:
    """What steps of prompts alone take by their work: a least-squares line through zero, older steps less."""

    seconds_work: float = 0.0
    work_work: float = 0.0
    largest_work: float = 0.0

    def observe(self, step: StepTime) -> None:
        """A step that another process held up counts as one of twice the time that was expected."""
        expected = step.prompt_work * self.seconds_work / self.work_work if self.work_work else math.inf
        seconds = min(step.seconds, MOST_OF_EXPECTED * expected) if expected else step.seconds
        self.seconds_work = DECAY * self.seconds_work + seconds * step.prompt_work
        self.work_work = DECAY * self.work_work + step.prompt_work**2
        self.largest_work = max(self.largest_work, step.prompt_work)

    def seconds_per_work(self) -> float:
        """0 where none was timed."""
        return self.seconds_work / self.work_work if self.work_work else 0.0

    def work_within(self, seconds: float) -> float:
        """FIRST_WORK at least, since a step reads all weights, however little it computes."""
        predicted = seconds / self.seconds_per_work() if self.seconds_work else 0.0
        return max(FIRST_WORK, min(GROWTH_LIMIT * self.largest_work, predicted))


def balance_tokens(config: ModelConfig) -> float:
    """Return the context, in tokens, at which attention costs a token as much arithmetic as all linear layers.

    From the shape of a dense layer. Experts and windows have another balance; what this gets wrong, the measured cost
    corrects from one step to the next.
    """
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linear = config.hidden_size * (2 * query + 2 * key_value + 3 * config.intermediate_size)
    return linear / (2 * query)  # scores and values, each one multiplication a token of context and element of a query


def pace_for(asked: int | None, default: int | None, before: Pace | None, config: ModelConfig) -> Pace | None:
    """Return the pace of a target in milliseconds; None without one. It keeps what the one `before` has learned.

    Args:
        asked: the target that somebody has asked for: an objective.
        default: the target of this kind of device.
    """
    target = asked if asked is not None else default
    if target is None:
        return None
    pace = before if before is not None else Pace(balance_tokens(config), target / 1000)
    pace.target_itl_seconds, pace.is_objective = target / 1000, asked is not None
    return pace


def longest_step_seconds(
    target_itl_seconds: float, decode_seconds: float, load: StepLoad, *, is_objective: bool = False
) -> float:
    """Return how long a step with prompts may last. A slower decode step or one more prompt never lowers it.

    Args:
        decode_seconds: what the step's decodes take without prompts, as measured.
        is_objective: somebody has asked for the target, so prompts give way to answers however many prompts wait.
    """
    longest = max(target_itl_seconds, LEAST_RATIO * decode_seconds)
    if is_objective or not load.num_decodes:
        return longest
    crowd = max(0, load.num_prompts - 1)
    ratio = min(MOST_RATIO, LEAST_RATIO * (1 + CROWD_GROWTH * crowd / load.num_decodes))
    return max(longest, min(MOST_CROWD_SECONDS, ratio * decode_seconds))


class Pace:
    """Learns how long steps take. `observe` after each, `budget` before each."""

    def __init__(self, balance_tokens: float, target_itl_seconds: float, *, is_objective: bool = False) -> None:
        """`is_objective`: somebody has asked for this target, so prompts give way to answers at any load."""
        self._balance_tokens = balance_tokens
        self.target_itl_seconds = target_itl_seconds  # both may change at any time: what was learned stays true
        self.is_objective = is_objective
        self.reset()

    def reset(self, growth: float = 0.0) -> None:
        """Forget the times of the steps so far. `growth`: of decode steps with their number of rows."""
        self._decodes = DecodeTimes(growth)
        self._prompts_alone = _PromptSteps()
        # Sums over mixed steps, older ones less, for a least-squares line through zero. So what a short prompt costs
        # beyond its tokens says little. Decodes are subtracted when the sums are read: by what they take by now.
        self._seconds_work = self._decodes_work = self._work_work = 0.0
        self._largest_work = 0.0
        self._mixed_steps = 0  # since the last decode step
        self._cost_at_decode = 0.0  # seconds a unit of work seemed to take when a decode step was last timed
        self._chosen: PromptPace | None = None

    @property
    def chosen(self) -> PromptPace | None:
        """What was chosen last for a step that prompts share; None before the first."""
        return self._chosen

    def step_time(self, chunks: Iterable[Chunk]) -> StepTime:
        """What a step is about to compute, its seconds still 0."""
        decodes, prompt_work = 0, 0.0
        for sequence, num_tokens in chunks:
            if num_tokens == 1 or sequence.draft_ids:  # a check is a decode
                decodes += 1
            else:
                prompt_work += work(num_tokens, sequence.num_computed_tokens, self._balance_tokens)
        return StepTime(decodes, prompt_work, seconds=0.0)

    def observe(self, step: StepTime) -> None:
        """Learn from a step that has run."""
        if not step.num_decodes:
            self._prompts_alone.observe(step)
            return
        if not step.prompt_work:
            self._observe_decodes(step)
            return
        self._mixed_steps += 1
        done, relative = step.prompt_work, self._decodes.relative(step.num_decodes)
        self._seconds_work = DECAY * self._seconds_work + step.seconds * done
        self._decodes_work = DECAY * self._decodes_work + relative * done
        self._work_work = DECAY * self._work_work + done * done
        self._largest_work = max(self._largest_work, step.prompt_work)

    def _observe_decodes(self, step: StepTime) -> None:
        if self._mixed_steps >= MIXED_STEPS_THAT_AGE_DECODES:
            self._decodes.clear()  # those before tell of another load
        self._decodes.observe(step.num_decodes, step.seconds)
        self._mixed_steps = 0
        self._cost_at_decode = self._seconds_per_work()

    def budget(self, load: StepLoad) -> PromptBudget:
        """Return what the next step, if it has decodes or several prompts, may compute of prompts."""
        if self._must_time_decodes():  # one token of a prompt costs what a decode costs
            return PromptBudget(load.max_tokens, 1.0, self._balance_tokens, least_tokens=1)
        longest = self._longest_step_seconds(load)
        budget = PromptBudget(load.max_tokens, self._allowed_work(load, longest), self._balance_tokens)
        self._chosen = self._report(load, budget, longest)
        return budget

    def _longest_step_seconds(self, load: StepLoad) -> float:
        decode_seconds = self._decodes.seconds(load.num_decodes)
        return longest_step_seconds(self.target_itl_seconds, decode_seconds, load, is_objective=self.is_objective)

    def _report(self, load: StepLoad, budget: PromptBudget, longest_seconds: float) -> PromptPace:
        cost = self._seconds_per_work() if load.num_decodes else self._prompts_alone.seconds_per_work()
        return PromptPace(
            target_itl_seconds=self.target_itl_seconds,
            longest_step_seconds=longest_seconds,
            chunk_tokens=max(budget.tokens_behind(0), min(budget.least_tokens, budget.tokens)),
            decode_step_seconds=self._decodes.seconds(load.num_decodes),
            prompt_tokens_per_second=1 / cost if cost else 0.0,
        )

    def _must_time_decodes(self) -> bool:
        """Whether what decodes take is in doubt: long not timed, or prompts seem to cost something else since then.

        Under a load that never pauses each step has prompts. When its decodes become slower (there are more of them,
        or others use the processor), prompts seem to cost more; so fewer are let in, and seem to cost yet more.
        """
        if self._mixed_steps < MIXED_STEPS_THAT_AGE_DECODES:
            return False
        change = self._seconds_per_work() / self._cost_at_decode if self._cost_at_decode else math.inf
        return self._mixed_steps >= MIXED_STEPS_PER_DECODE_STEP or not 1 / DOUBTFUL_CHANGE < change < DOUBTFUL_CHANGE

    def _allowed_work(self, load: StepLoad, longest_seconds: float) -> float:
        if not load.num_decodes and self._prompts_alone.work_work:
            return self._prompts_alone.work_within(longest_seconds)
        most = max(FIRST_WORK, GROWTH_LIMIT * self._largest_work)
        cost = self._seconds_per_work()
        if not cost:  # nothing timed, or by a clock too coarse to see a chunk
            return most if not self._work_work else math.inf
        return min(most, (longest_seconds - self._decodes.seconds(load.num_decodes)) / cost)

    def _seconds_per_work(self) -> float:
        """What prompts have cost of late; 0 where none was timed."""
        if not self._work_work:
            return 0.0
        beyond_decodes = self._seconds_work - self._decodes_work * self._decodes.scale()
        return max(beyond_decodes, LEAST_PROMPT_SHARE * self._seconds_work) / self._work_work
