"""Log-probabilities under the model's own distribution: what evaluation tools and `logprobs` clients read.

They come from the raw logits, before temperature, penalties and filters (OpenAI's and vLLM's meaning), in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from millstream_runtime.engine.request import TokenLogprobs
from millstream_runtime.engine.transfer import ReadBack

# Rows of a prompt whose logits are in memory at once, each in several copies: 64 rows of a vocabulary of 152,000 take
# 165 MB, and 256 would take 660.
PROMPT_SLAB_ROWS = 64


def log_softmax(logits: Tensor) -> Tensor:
    """`[R, vocab]` to the same in float32; never shares memory with its input."""
    return torch.log_softmax(logits.float(), dim=-1)


class Description(NamedTuple):
    """Of R rows."""

    ranks: Tensor  # integers [R] of the tokens, 1 for the most likely
    logprobs: Tensor  # float32 [R], theirs
    best_ids: Tensor  # integers [R, n], the most likely first
    best: Tensor  # float32 [R, n]


DescribeTokens = Callable[[Tensor, Tensor, int], Description]
"""Logits `[R, vocab]` as the model gave them, token ids `[R]` and n, at most vocab, to their description."""


def describe(logprobs: Tensor, token_ids: Tensor, num_best: int) -> Description:
    """A `DescribeTokens` of what `log_softmax` gave, by torch."""
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    best, best_ids = logprobs.topk(num_best, dim=-1)
    return Description(ranks, chosen[:, 0], best_ids, best)


class Described:
    """Tokens with rank and alternatives, on their way to the host: nothing waits before `entries`."""

    def __init__(
        self, rows: Tensor, token_ids: Tensor, num_top: Seq[int], describe_rows: DescribeTokens = describe
    ) -> None:
        """`rows` `[R, vocab]`: what `describe_rows` takes, by default log-probabilities in float32; `token_ids` `[R]`
        int64; `num_top`: alternatives of each row."""
        self._num_top = num_top
        self._most = min(max(num_top, default=0), rows.shape[-1])
        ranks, chosen, best_ids, best = describe_rows(rows, token_ids, self._most)
        columns = [token_ids[:, None], ranks[:, None], chosen[:, None], best_ids, best]
        # One copy: float64 holds ids, ranks and float32 exactly.
        self._numbers = ReadBack(torch.cat([column.double() for column in columns], dim=1))

    def entries(self) -> list[TokenLogprobs]:
        """One entry per row: the token, its rank, and the best. Waits for the device."""
        return [
            TokenLogprobs(int(row[0]), row[2], int(row[1]), self._top(row, count))
            for row, count in zip(self._numbers.tolist(), self._num_top, strict=True)
        ]

    def _top(self, row: list[float], count: int) -> tuple[tuple[int, float], ...]:
        ids, values = row[3 : 3 + self._most], row[3 + self._most :]
        return tuple((int(token_id), value) for token_id, value in zip(ids[:count], values[:count], strict=True))
