"""What stands in for grammars (`response_format`, tools): processors that forbid tokens, of one request in six."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from millstream_runtime.engine.request import Request
from millstream_runtime.engine.sampling.logits_processors import LogitsProcessor

PERIOD = 12  # prompts whose sum is 0 or 1 modulo it are constrained


class ForbidsAThird:
    """Which third of the tokens is forbidden follows from the answer so far. Its requests may draft."""

    follows_generated_ids = True

    def __call__(self, logits: Tensor, generated_ids: Sequence[int]) -> None:
        logits[sum(generated_ids) % 3 :: 3] = float("-inf")


class ForbidsByTurns:
    """Even tokens and odd ones by turns, which it counts itself: its requests draft nothing."""

    def __init__(self) -> None:
        self._num_calls = 0

    def __call__(self, logits: Tensor, generated_ids: Sequence[int]) -> None:
        logits[self._num_calls % 2 :: 2] = float("-inf")
        self._num_calls += 1


def processors_of(request: Request) -> tuple[LogitsProcessor, ...]:
    """By the prompt alone, so that a request has the same wherever it runs."""
    match sum(request.prompt_token_ids) % PERIOD:
        case 0:
            return (ForbidsAThird(),)
        case 1:
            return (ForbidsByTurns(),)
        case _:
            return ()
