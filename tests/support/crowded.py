"""An engine that never has time for a prompt while answers are under way: whatever prompts share a step is cut."""

from __future__ import annotations

from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.scheduling.pacing import Pace

PROMPT_TOKENS = 9  # odd, so that chunks end anywhere in a block


class Crowded(Pace):
    """Allows a layer of a few tokens a step, whatever was timed."""

    def most_tokens(self, context_tokens: int) -> int:
        return PROMPT_TOKENS

    def layers(self, prompt_work: float) -> int:
        return 1


def crowd(engine: Engine) -> None:
    """Have it so from now on."""
    engine._chunked_prefill.pace = Crowded(1.0, engine.model_config.num_layers)
