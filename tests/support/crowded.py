"""An engine that has little time for prompts while answers are under way: whatever prompts share a step is cut."""

from __future__ import annotations

import math
from collections.abc import Iterable

from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.scheduling.pacing import Pace, StepTime
from millstream_runtime.engine.scheduling.prompt_budget import PromptBudget, StepLoad
from millstream_runtime.engine.scheduling.step_plan import Chunk

PROMPT_TOKENS = 9  # odd, so that chunks end anywhere in a block


class Crowded(Pace):
    """Allows a few tokens a step, whatever was timed."""

    prompt_tokens = PROMPT_TOKENS
    num_cut = 0  # chunks of prompts that were computed in part

    def budget(self, load: StepLoad) -> PromptBudget:
        return PromptBudget(load.max_tokens, self.prompt_tokens, math.inf, least_tokens=1)

    def step_time(self, chunks: Iterable[Chunk]) -> StepTime:
        self.num_cut += sum(not chunk.samples for chunk in chunks)
        return super().step_time(chunks)


def crowd(engine: Engine, prompt_tokens: int = PROMPT_TOKENS) -> None:
    """Have it so from now on, with `prompt_tokens` per step."""
    pace = Crowded(1.0, target_itl_seconds=0.05)
    pace.prompt_tokens = prompt_tokens
    engine._pace = pace
