"""Logits -> the next token of each row, all rows at once.

Randomness is counter-based: the uniform number behind a token is a hash of the request's seed, the token's position
and how often a draw for it was refused (`draw`), nothing else. So a seeded request gives the same tokens alone or in
any batch, chunked or after a preemption, without a generator to carry along. The number picks a token by inverting the
cumulative distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.engine.sampling import logits_processors
from millstream_runtime.engine.sampling.checked_counts import select
from millstream_runtime.engine.sampling.draw import cut, cut_nuclei, draw, draw_on_host
from millstream_runtime.engine.sampling.logits_processors import LogitsProcessor
from millstream_runtime.engine.sampling.logprobs import DescribeTokens
from millstream_runtime.engine.sampling.rejection import INSTEAD, STANDS, Proposal, draw_by_proposal
from millstream_runtime.engine.sampling.token_counts import History, TokenCounts
from millstream_runtime.engine.transfer import on_device

_MASK64 = (1 << 64) - 1
_LEAST_TEMPERATURE = 1e-30  # float32 has no smaller ones to divide by; all it leaves is the highest logit


class SamplingRow(NamedTuple):
    """What one row of logits is to become. A tuple takes a third of the time of a frozen dataclass."""

    params: SamplingParams
    seed: int
    position: int  # of the token about to be sampled, counted from the start of the prompt
    suppressed_ids: frozenset[int] = frozenset()  # may not come up yet: end-of-sequence before min_tokens
    history: History | None = None  # of a penalised request
    generated_ids: Seq[int] = ()  # where there are processors
    processors: Seq[LogitsProcessor] = ()
    proposal: Proposal | None = None  # a draft and what it was drawn from; on a CPU alone

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the argmax of the model's own logits is the token."""
        params = self.params
        return (
            params.temperature == 0
            and not params.logit_bias
            and not self.suppressed_ids
            and self.history is None
            and not self.processors
        )

    @property
    def is_plain_draw(self) -> bool:
        """Whether the token is drawn from the model's own logits, by temperature and `top_p` alone."""
        params = self.params
        return (
            params.temperature > 0
            and not params.top_k
            and not params.min_p
            and not params.logit_bias
            and not self.suppressed_ids
            and self.history is None
            and self.proposal is None
            and not self.processors
        )


def greedy(logits: Tensor) -> list[int]:
    """`[R, vocab]` to the argmax of each row; -1 where its logits are not finite. The path of plain requests."""
    tokens: list[int] = greedy_on_device(logits).tolist()
    return tokens


def greedy_on_device(logits: Tensor) -> Tensor:
    """The same as a tensor `[R]` int64 on the device of `logits`, without waiting for it."""
    return _unless_broken(*logits.max(dim=-1))


def _unless_broken(highest: Tensor, tokens: Tensor) -> Tensor:
    """-1 for `tokens` whose row's maximum is infinite, or NaN, which the maximum of a row with a NaN is.

    Three small operations; `isfinite` alone is four.
    """
    return torch.where(highest.abs() < float("inf"), tokens, -1)


ChooseTokens = Callable[[Tensor, Seq[SamplingRow]], Tensor]
"""float32 logits `[R, vocab]`, after bias and penalties, to tokens `[R]`, -1 where a row's logits are not finite."""


@dataclass(frozen=True, slots=True)
class SamplerKernels:
    """Kernels in place of torch's operations."""

    choose: ChooseTokens
    describe: DescribeTokens


def sample(
    logits: Tensor, rows: Seq[SamplingRow], counts: TokenCounts | None = None, choose: ChooseTokens | None = None
) -> Tensor:
    """`logits` `[R, vocab]` to token ids `[R]` int64 on the same device; -1 where a row's logits are not finite.

    Rows that are not plain greedy are computed in float32, whatever the model computes in. `logits` may be changed.

    Args:
        counts: tokens of the rows that have a history; the new tokens are counted there.
        choose: a kernel in place of torch's operations.
    """
    changed = [index for index, row in enumerate(rows) if not row.is_plain_greedy]
    if not changed:
        return greedy_on_device(logits)
    if len(changed) == len(rows):
        return _sample_in_float32(logits.float(), rows, counts, choose)
    tokens = greedy_on_device(logits)
    place = on_device(changed, logits.device)
    wide = logits.index_select(0, place).float()
    some = _sample_in_float32(wide, [rows[index] for index in changed], counts, choose)
    return tokens.index_copy_(0, place, some)


def _sample_in_float32(
    logits: Tensor, rows: Seq[SamplingRow], counts: TokenCounts | None, choose: ChooseTokens | None
) -> Tensor:
    """`logits` `[R, vocab]` float32, changed, to token ids `[R]`."""
    logits = logits.contiguous()
    if choose is None and logits.device.type == "cpu" and all(row.is_plain_draw for row in rows):
        return _sample_plain_draws(logits, rows)
    penalised = [index for index, row in enumerate(rows) if row.history is not None]
    counted = None
    if counts is not None and penalised:
        counted = select(counts, [row.history for row in rows if row.history is not None])
    logits_processors.apply_all(logits, rows, counted)
    if choose is not None:
        tokens = choose(logits, rows)
    else:
        highest = logits.amax(dim=-1)
        tokens = _unless_broken(highest, _choose(logits, highest, rows))
    if counted is not None:
        some = tokens if len(penalised) == len(rows) else tokens.index_select(0, on_device(penalised, tokens.device))
        counted.add(some)
    return tokens


def _sample_plain_draws(logits: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    """The same on a CPU, where no row asks for more than a temperature and `top_p`.

    It is what the other path does, without passes that would find nothing to do. In a step of a model of 2,048 tokens
    each of them costs several times what it costs in a loop: its code is in no cache any more.
    """

    def number(index: int, attempt: int) -> float:
        return uniform(rows[index].seed, rows[index].position, attempt)

    highest = logits.amax(dim=-1)
    drawn = draw_on_host(_weights(logits, highest, rows, None), [row.params for row in rows], number)
    tokens = [token if math.isfinite(one) else -1 for token, one in zip(drawn, highest.tolist(), strict=True)]
    return torch.from_numpy(np.array(tokens, np.int64))


def _choose(logits: Tensor, highest: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    """The argmax of rows of temperature 0, a drawn token of the others. `highest` `[R]`: each row's maximum."""
    chosen = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if not chosen:
        return logits.argmax(dim=-1)
    if len(chosen) == len(rows):
        return _draw(logits, highest, rows, None)
    tokens, place = logits.argmax(dim=-1), on_device(chosen, logits.device)
    return tokens.index_copy_(0, place, _draw(logits, highest, [rows[index] for index in chosen], place))


def _draw(logits: Tensor, highest: Tensor, rows: Seq[SamplingRow], place: Tensor | None) -> Tensor:
    """`place`: where the rows are in `logits`; None: they are all."""
    weights = _weights(logits, highest, rows, place)
    tokens = draw(
        weights,
        [row.params for row in rows],
        lambda index, attempt: uniform(rows[index].seed, rows[index].position, attempt),
    )
    proposed = [index for index, row in enumerate(rows) if row.proposal is not None]
    return _draw_by_proposals(tokens, weights, rows, proposed) if proposed else tokens


def _draw_by_proposals(tokens: Tensor, weights: Tensor, rows: Seq[SamplingRow], proposed: list[int]) -> Tensor:
    """Replace the `tokens` of rows that have a proposal. `weights` are cut, but for their nuclei."""
    some = weights[proposed]
    cut_nuclei(some, [rows[index].params for index in proposed])
    found = tokens.tolist()
    for index, row_weights in zip(proposed, some.numpy(), strict=True):
        row = rows[index]
        if row.proposal is not None:
            stands = uniform(row.seed, row.position, STANDS)
            instead = uniform(row.seed, row.position, INSTEAD)
            found[index] = draw_by_proposal(row_weights, row.proposal, stands, instead)
    return torch.tensor(found, dtype=torch.int64)


def filtered_weights(logits: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    """What rows of a temperature above 0 are drawn from, without penalties, bias and processors.

    `logits` `[R, vocab]` float32, changed, to weights of the same shape, of which each row's highest is 1.
    """
    weights = _weights(logits, logits.amax(dim=-1), rows, None)
    cut(weights, [row.params for row in rows])
    return weights


def uniform(seed: int, position: int, attempt: int = 0) -> float:
    """A number in [0, 1) from what is given: two rounds of SplitMix64 (Steele, Lea and Flood 2014)."""
    return (_mix(_mix(seed & _MASK64) ^ position ^ (attempt << 48)) >> 11) * 2.0**-53


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


def _weights(logits: Tensor, highest: Tensor, rows: Seq[SamplingRow], place: Tensor | None) -> Tensor:
    """What softmax divides by its sum, at each row's temperature: `[len(rows), vocab]`, the highest 1.

    The maximum goes first: no overflow. `place`: where the rows are in `logits`; None: they are all.
    """
    if place is not None:
        logits, highest = logits.index_select(0, place), highest.index_select(0, place)
    temperature = on_device([max(row.params.temperature, _LEAST_TEMPERATURE) for row in rows], logits.device)
    return logits.sub_(highest[:, None]).div_(temperature[:, None]).exp_()
