"""Logits -> the next token of each row, all rows at once.

Randomness is counter-based: the uniform number behind a token is a hash of the request's seed and the token's
position, nothing else. So a seeded request gives the same tokens alone or in any batch, chunked or after a
preemption, without a generator to carry along. The number picks a token by inverting the cumulative distribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_runtime.engine import logits_processors
from millstream_runtime.engine.logits_processors import LogitsProcessor
from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.engine.transfer import on_device

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row of logits is to become."""

    params: SamplingParams
    seed: int
    position: int  # of the token about to be sampled, counted from the start of the prompt
    suppressed_ids: frozenset[int] = frozenset()  # may not come up yet: end-of-sequence before min_tokens
    token_counts: Mapping[int, int] | None = None  # see Sequence.token_counts
    generated_ids: Seq[int] = ()
    processors: Seq[LogitsProcessor] = ()

    @property
    def is_filtered(self) -> bool:
        """Whether tokens are cut from the distribution before the draw."""
        return self.params.top_k > 0 or self.params.top_p < 1 or self.params.min_p > 0


def greedy(logits: Tensor) -> list[int]:
    """`[R, vocab]` to the argmax of each row; -1 where its logits are not finite. The path of plain requests.

    On a CPU numpy looks for it with vector instructions, which torch does not: 16 rows of 2,048 take 10 us, not 60.
    """
    if logits.device.type != "cpu" or logits.dtype not in (torch.float32, torch.float64):
        return greedy_on_device(logits).tolist()
    array = logits.numpy()
    tokens: list[int] = array.argmax(axis=-1).tolist()  # of the first NaN, where there is one
    return [token if math.isfinite(row[token]) else -1 for row, token in zip(array, tokens, strict=True)]


def greedy_on_device(logits: Tensor) -> Tensor:
    """The same as a tensor `[R]` int64 on the device of `logits`, which nobody waits for."""
    return _unless_broken(*logits.max(dim=-1))


def _unless_broken(highest: Tensor, tokens: Tensor) -> Tensor:
    """-1 for `tokens` whose row's maximum is infinite, or NaN, which the maximum of a row with a NaN is.

    Three small operations; `isfinite` alone is four.
    """
    return torch.where(highest.abs() < float("inf"), tokens, -1)


def sample(logits: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    """`logits` `[R, vocab]` to token ids `[R]` int64 on the same device; -1 where a row's logits are not finite.

    `logits` may be changed.
    """
    logits_processors.apply_all(logits, rows)
    highest, tokens = logits.max(dim=-1)
    random = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    plain = [index for index in random if not rows[index].is_filtered]
    filtered = [index for index in random if rows[index].is_filtered]
    for chosen, draw in ((plain, _invert), (filtered, _sample_filtered)):
        if chosen:
            index = on_device(chosen, logits.device)
            tokens.index_copy_(0, index, draw(_probabilities(logits, highest, rows, chosen, index), rows, chosen))
    return _unless_broken(highest, tokens)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position): two rounds of SplitMix64 (Steele, Lea and Flood 2014)."""
    return (_mix(_mix(seed & _MASK64) ^ position) >> 11) * 2.0**-53


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


def _probabilities(logits: Tensor, highest: Tensor, rows: Seq[SamplingRow], chosen: list[int], index: Tensor) -> Tensor:
    """Softmax at each row's temperature, `[len(chosen), vocab]` float32. The maximum goes first: no overflow.

    `index`: `chosen` on the device.
    """
    temperature = on_device([rows[i].params.temperature for i in chosen], logits.device)[:, None]
    shifted = logits.index_select(0, index) - highest.index_select(0, index)[:, None]
    return (shifted.float() / temperature).softmax(dim=-1)


def _sample_filtered(probabilities: Tensor, rows: Seq[SamplingRow], chosen: list[int]) -> Tensor:
    """Min-p, then top-k, then top-p of what is left, in the order of falling probability (stable: ties by token id)."""

    def each(values: Seq[float]) -> Tensor:
        return on_device(values, probabilities.device)[:, None]

    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    vocab_size = ranked.shape[-1]
    params = [rows[index].params for index in chosen]
    top_k = each([one.top_k or vocab_size for one in params])
    # The first token passes every filter: its probability is the greatest, its rank 0, and nothing is before it.
    ranked.masked_fill_(ranked < each([one.min_p for one in params]) * ranked[:, :1], 0.0)
    ranked.masked_fill_(torch.arange(vocab_size, device=ranked.device)[None, :] >= top_k, 0.0)
    ranked /= ranked.sum(dim=-1, keepdim=True)
    # A token stays while those before it hold less than top_p; the first always stays.
    before = ranked.cumsum(dim=-1) - ranked
    beyond = before >= each([one.top_p for one in params])
    beyond[:, 0] = False
    ranked.masked_fill_(beyond, 0.0)
    return order.gather(1, _invert(ranked, rows, chosen)[:, None]).squeeze(1)


def _invert(weights: Tensor, rows: Seq[SamplingRow], chosen: list[int]) -> Tensor:
    """The first index whose cumulative weight exceeds the row's uniform share of the total: never one of weight 0."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    shares = [uniform(rows[i].seed, rows[i].position) for i in chosen]
    target = on_device(shares, weights.device, torch.float64)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=weights.shape[-1] - 1)
