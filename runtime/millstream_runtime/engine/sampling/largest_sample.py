"""The sampling of a step that takes most memory: every row has penalties, top-p and log-probabilities.

A GPU computes it at the end of the largest step, whose memory it measures. It is computed by torch: kernels take less.
"""

from __future__ import annotations

from torch import Tensor

from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.engine.sampling import logprobs
from millstream_runtime.engine.sampling.sampler import SamplingRow, sample
from millstream_runtime.engine.sampling.token_counts import History, TokenCounts

ASKED = SamplingParams(
    1, temperature=1.0, top_p=0.9, presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1, logprobs=20
)


def sample_largest(logits: Tensor) -> None:
    """Sample a token of each row, and describe it. `logits` `[R, vocab]` are changed."""
    kept = logprobs.log_softmax(logits)  # before the sampler changes the logits, as in a step
    rows = [SamplingRow(ASKED, row, 1, history=History(row, row, [0], 1, True)) for row in range(len(logits))]
    tokens = sample(logits, rows, TokenCounts(len(rows), logits.device))
    logprobs.Described(kept, tokens.clamp(min=0), [ASKED.logprobs or 0] * len(rows))
