"""The prompts that every side of a comparison gets.

    batch-1        one prompt, 128 new tokens
    equal          16 prompts, 128 new tokens each
    mixed          16 prompts, 32 to 512 new tokens, in shuffled order

Lengths are always the same. The token ids change from round to round, so that nobody meets a prompt again and a prefix
cache, ours or a peer's, has nothing to give.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

NUM_CONCURRENT = 16
MAX_PROMPT_TOKENS, MAX_NEW_TOKENS = 64, 512


@dataclass(frozen=True)
class Case:
    """Prompts (token ids) and how many tokens each is to be answered with."""

    name: str
    prompts: list[list[int]]
    new_tokens: list[int]


def make_cases(vocab_size: int, round_: int = 0, most_new_tokens: int = MAX_NEW_TOKENS) -> list[Case]:
    """The three cases of one round, the same on every machine. Prompts have 16 to 64 tokens.

    Args:
        most_new_tokens: of the longest answer; the others shrink with it (a quick look on a slow machine).
    """
    lengths = random.Random(7)
    prompt_tokens = [lengths.randint(16, MAX_PROMPT_TOKENS) for _ in range(NUM_CONCURRENT)]
    least, equal = max(1, most_new_tokens // 16), max(1, most_new_tokens // 4)
    mixed = [least + round(i * (most_new_tokens - least) / (NUM_CONCURRENT - 1)) for i in range(NUM_CONCURRENT)]
    lengths.shuffle(mixed)
    ids = random.Random(f"{round_}/ids")
    prompts = [[ids.randrange(3, vocab_size) for _ in range(count)] for count in prompt_tokens]
    return [
        Case("batch-1", prompts[:1], [equal]),
        Case("equal", prompts, [equal] * NUM_CONCURRENT),
        Case("mixed", prompts, mixed),
    ]
