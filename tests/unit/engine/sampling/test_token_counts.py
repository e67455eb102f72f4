"""Tokens counted on the device: always those of the request, whoever had the row before and whatever was counted."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.engine.sampling import token_counts
from millstream_runtime.engine.sampling.sampler import SamplingRow, sample
from millstream_runtime.engine.sampling.token_counts import History, TokenCounts

VOCAB, NUM_ROWS = 23, 4
PENALTIES = [
    SamplingParams(1, temperature=0.0, presence_penalty=1.5),
    SamplingParams(1, temperature=0.0, frequency_penalty=0.4, presence_penalty=-0.3),
    SamplingParams(1, temperature=0.0, repetition_penalty=1.7),
    SamplingParams(1, temperature=0.0, repetition_penalty=0.8, frequency_penalty=0.9),
]


@dataclass
class Asker:
    """A request that runs in `row`, or waits with its tokens."""

    owner: int
    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    row: int | None = None

    @property
    def history(self) -> History:
        assert self.row is not None
        return History(self.row, self.owner, self.tokens, self.num_prompt, self.params.repetition_penalty != 1.0)

    def expected(self, logits: torch.Tensor) -> int:
        """The token by the definitions of the penalties."""
        answer, params = Counter(self.tokens[self.num_prompt :]), self.params
        scores = logits.tolist()
        for token in set(self.tokens):
            if params.repetition_penalty != 1.0:
                up = scores[token] > 0
                scores[token] *= 1 / params.repetition_penalty if up else params.repetition_penalty
            if answer[token]:
                scores[token] -= params.frequency_penalty * answer[token] + params.presence_penalty
        return scores.index(max(scores))


@pytest.mark.parametrize("seed", range(4))
def test_counts_follow_requests_through_rows_preemptions_and_skipped_steps(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_counts, "CHUNK_ENTRIES", 3)  # so that requests have several
    monkeypatch.setattr(token_counts, "LEAST_CHUNKS", 2)
    rng, random_logits = random.Random(seed), torch.Generator().manual_seed(seed)
    counts, askers, free = TokenCounts(NUM_ROWS, torch.device("cpu")), [], set(range(NUM_ROWS))
    for step in range(300):
        if free and rng.random() < 0.4:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
            askers.append(Asker(step, rng.choice(PENALTIES), prompt, len(prompt)))
        for one in askers:
            if one.row is None and free:
                one.row = free.pop()
            elif one.row is not None and rng.random() < 0.1:  # preempted
                free.add(one.row)
                one.row = None
        if askers and rng.random() < 0.1:  # ends
            gone = askers.pop(rng.randrange(len(askers)))
            free |= {gone.row} - {None}  # type: ignore[arg-type]
        now = [one for one in askers if one.row is not None and rng.random() < 0.8]
        rng.shuffle(now)
        if now:
            logits = torch.randn(len(now) + 1, VOCAB, generator=random_logits)
            rows = [SamplingRow(one.params, 0, len(one.tokens), history=one.history) for one in now]
            plain = SamplingRow(SamplingParams(1, temperature=0.0), 0, 0)
            expected = [one.expected(row) for one, row in zip(now, logits, strict=False)]
            got = sample(logits, [*rows, plain], counts).tolist()
            assert got[:-1] == expected
            for one, token in zip(now, got, strict=False):
                one.tokens.append(token)


def test_memory_follows_the_tokens_and_is_used_again() -> None:
    counts = TokenCounts(64, torch.device("cpu"))
    prompt = list(range(1000))
    for owner in range(200):  # two at a time
        row = 2 * (owner % 32)
        counts.select([History(row, owner, prompt, 1000, True), History(row + 1, owner + 1000, prompt, 1000, False)])
    assert counts.num_bytes <= 64 * 1024


def test_a_token_that_is_not_read_is_not_counted_from_the_host() -> None:
    counts = TokenCounts(1, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="not read"):
        counts.select([History(0, 0, [3, -1], 1, False)])
