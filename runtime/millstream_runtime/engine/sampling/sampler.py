"""Logits -> the next token of each row, all rows at once.

Randomness is counter-based: the uniform number behind a token is a hash of the request's seed, the token's position
and how often a draw for it was refused (`draw`), nothing else. So a seeded request gives the same tokens alone or in
any batch, chunked or after a preemption, without a generator to carry along. The number picks a token by inverting the
cumulative distribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.engine.sampling import logits_processors
from millstream_runtime.engine.sampling.draw import draw
from millstream_runtime.engine.sampling.logits_processors import LogitsProcessor
from millstream_runtime.engine.transfer import on_device

_MASK64 = (1 << 64) - 1
_LEAST_TEMPERATURE = 1e-30  # float32 has no smaller ones to divide by; all it leaves is the highest logit


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
    """The same as a tensor `[R]` int64 on the device of `logits`, without waiting for it."""
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
    chosen = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if chosen:
        drawn = [rows[index] for index in chosen]
        place = None if len(chosen) == len(rows) else on_device(chosen, logits.device)
        weights = _weights(logits, highest, drawn, place)
        picked = draw(
            weights,
            [row.params for row in drawn],
            lambda index, attempt: uniform(drawn[index].seed, drawn[index].position, attempt),
        )
        tokens = picked if place is None else tokens.index_copy_(0, place, picked)
    return _unless_broken(highest, tokens)


def uniform(seed: int, position: int, attempt: int = 0) -> float:
    """A number in [0, 1) from what is given: two rounds of SplitMix64 (Steele, Lea and Flood 2014)."""
    return (_mix(_mix(seed & _MASK64) ^ position ^ (attempt << 48)) >> 11) * 2.0**-53


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


def _weights(logits: Tensor, highest: Tensor, rows: Seq[SamplingRow], place: Tensor | None) -> Tensor:
    """What softmax divides by its sum, at each row's temperature: `[len(rows), vocab]` float32, the highest 1.

    The maximum goes first: no overflow. `place`: where the rows are in `logits`; None: they are all.
    """
    if place is not None:
        logits, highest = logits.index_select(0, place), highest.index_select(0, place)
    temperature = on_device([max(row.params.temperature, _LEAST_TEMPERATURE) for row in rows], logits.device)
    return logits.sub_(highest[:, None]).float().div_(temperature[:, None]).exp_()
