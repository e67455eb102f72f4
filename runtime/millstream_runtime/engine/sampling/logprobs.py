"""Log-probabilities under the model's own distribution: what evaluation tools and `logprobs` clients read.

They come from the raw logits, before temperature, penalties and filters (OpenAI's and vLLM's meaning), in float32.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from millstream_runtime.engine.request import TokenLogprobs

# Rows of a prompt whose logits are in memory at once: 256 rows of a 128,000-token vocabulary are 131 MB in float32.
PROMPT_SLAB_ROWS = 256


def log_softmax(logits: Tensor) -> Tensor:
    """`[R, vocab]` to the same in float32; never shares memory with its input."""
    return torch.log_softmax(logits.float(), dim=-1)


def describe(logprobs: Tensor, token_ids: Tensor, num_top: Seq[int]) -> list[TokenLogprobs]:
    """One entry a row of `logprobs` `[R, vocab]`: the token `token_ids` `[R]`, its rank, and `num_top[row]` best."""
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    best, best_ids = logprobs.topk(min(max(num_top, default=0), logprobs.shape[-1]), dim=-1)
    columns = zip(
        token_ids.tolist(),
        chosen[:, 0].tolist(),
        ranks.tolist(),
        best_ids.tolist(),
        best.tolist(),
        num_top,
        strict=True,
    )
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:count], values[:count], strict=True)))
        for token_id, logprob, rank, ids, values, count in columns
    ]
