"""An engine that never has time for a prompt while answers are under way: whatever prompts share a step is cut."""

from __future__ import annotations

from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.scheduling.pacing import Pace

PROMPT_TOKENS = 9  # odd, so that chunks end anywhere in a block


class Crowded(Pace):
    """Allows a layer of a few tokens a step, whatever was timed."""

    prompt_tokens = PROMPT_TOKENS

    def most_tokens(self, context_tokens: int) -> int:
        return self.prompt_tokens

    def layers(self, prompt_work: float) -> int:
        return 1


def crowd(engine: Engine, prompt_tokens: int = PROMPT_TOKENS) -> None:
    """Have it so from now on, with chunks of `prompt_tokens`."""
    pace = Crowded(1.0, engine.model_config.num_layers)
    pace.prompt_tokens = prompt_tokens
    engine._chunked_prefill.pace = pace
