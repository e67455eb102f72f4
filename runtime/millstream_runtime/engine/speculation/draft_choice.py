"""Which token a draft model proposes behind a row of its logits: the rule of acceptance decides.

    Identity        the most probable one: a draft stands if the target draws it, with probability p(draft)
    Distribution    of sampled requests without a seed one drawn from q, the draft model's own distribution at the
                    request's temperature and filters: it stands with the sum of min(p, q) (`sampling.rejection`)

What drafts were drawn from is kept in `Sequence.proposals` until the next drafts: 4 bytes per draft and token of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from torch import Tensor

from millstream_runtime.engine.sampling import rejection
from millstream_runtime.engine.sampling.redraws import draw_from
from millstream_runtime.engine.sampling.rejection import Proposal
from millstream_runtime.engine.sampling.sampler import SamplingRow, filtered_weights, greedy, uniform
from millstream_runtime.engine.scheduling.sequence import Sequence


class DraftChoice(Protocol):
    """See above."""

    def begin(self) -> None:
        """Forget what the drafts before were drawn from."""

    def choose(self, logits: Tensor, rows: Seq[tuple[Sequence, int]]) -> list[int]:
        """`logits` `[R, vocab]` to a draft of each row, -1 where its logits are not finite.

        `rows`: for each row its sequence, and the drafts that it has already.
        """


class MostProbable:
    """The `DraftChoice` of acceptance by identity."""

    def begin(self) -> None:
        """Nothing is kept."""

    def choose(self, logits: Tensor, rows: Seq[tuple[Sequence, int]]) -> list[int]:
        """See `DraftChoice`."""
        return greedy(logits)


class Drawn:
    """The `DraftChoice` of acceptance by distribution."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size`: of the target: a token that it lacks is never drawn."""
        self._vocab_size = vocab_size
        self._kept: list[Sequence] = []

    def begin(self) -> None:
        """See `DraftChoice`."""
        for sequence in self._kept:
            sequence.proposals = []
        self._kept = []

    def choose(self, logits: Tensor, rows: Seq[tuple[Sequence, int]]) -> list[int]:
        """See `DraftChoice`."""
        tokens = greedy(logits)
        drawn = [index for index, (one, _) in enumerate(rows) if tokens[index] >= 0 and may_be_drawn(one)]
        if not drawn:
            return tokens
        sampling = [_sampling_row(*rows[index]) for index in drawn]
        weights = filtered_weights(logits[drawn, : self._vocab_size].float(), sampling)
        found = draw_from(weights, [uniform(row.seed, row.position, rejection.DRAFT) for row in sampling])
        weights /= weights.sum(dim=-1, keepdim=True)
        for index, token_id, row in zip(drawn, found.tolist(), weights.numpy(), strict=True):
            tokens[index] = token_id
            sequence, num_drafts = rows[index]
            if not num_drafts:
                self._kept.append(sequence)
            sequence.proposals[num_drafts:] = [Proposal(token_id, row)]
        return tokens


def may_be_drawn(sequence: Sequence) -> bool:
    """Whether its drafts are drawn: the tokens of a seed must not depend on drafts, and a greedy request draws none."""
    params = sequence.request.sampling
    return params.temperature > 0 and params.seed is None


def _sampling_row(sequence: Sequence, num_drafts: int) -> SamplingRow:
    return SamplingRow(sequence.request.sampling, sequence.seed, len(sequence.token_ids) + num_drafts)
