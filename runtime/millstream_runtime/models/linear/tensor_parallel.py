"""Tensor-parallel layers: each rank keeps a share of a weight, and all ranks compute every token together.

    embedding   rows of the vocabulary         each rank looks up what it has, zeros elsewhere -> sum
    QKV, gate   columns: heads, hidden units   nothing to exchange
    output      rows: the same heads or units  partial results                                 -> sum
    head        columns: the vocabulary        a part of the logits                            -> gathered by rank 0

Two sums a layer. What is summed comes out alike, bit for bit, on every rank: so whatever follows from it (norms, the
experts that a router chooses) is computed by each of them and never exchanged. `Ranks` is the only door to the other
processes; which part is whose says `models.shares`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.models.linear.shares import vocabulary_part


class Ranks(Protocol):
    """The processes that share a model, and which one this is."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over all ranks, in place, on every rank: the same bits on each."""

    def gather(self, part: Tensor) -> list[Tensor]:
        """On rank 0 what every rank gave, in their order; elsewhere nothing. All of one shape."""


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """One rank: nobody to ask."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def gather(self, part: Tensor) -> list[Tensor]:
        return [part]


@dataclass(frozen=True, slots=True)
class PlannedRanks:
    """A place among ranks that do not run yet: enough to ask what each would load, and to refuse what cannot be cut."""

    rank: int
    size: int

    def all_reduce(self, partial: Tensor) -> Tensor:
        raise NotImplementedError

    def gather(self, part: Tensor) -> list[Tensor]:
        raise NotImplementedError


SINGLE_PROCESS = SingleProcess()


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """A linear whose inputs are spread over the ranks; every rank gets the whole output."""

    part: Linear  # in of this rank -> out, without the bias
    bias: Tensor | None  # [out], added once, after the sum
    ranks: Ranks

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in of this rank]` to `[T, out]`."""
        total = self.ranks.all_reduce(self.part(x))
        return total if self.bias is None else total.add_(self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += self(x)`. Not as one product: the residual stream must be added once, not once a rank."""
        residual.add_(self(x))


@dataclass(frozen=True, slots=True)
class Embedding:
    """`[vocab, hidden]`, whole."""

    weight: Tensor

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`[T]` to `[T, hidden]`."""
        return F.embedding(token_ids, self.weight)


@dataclass(frozen=True, slots=True)
class VocabularyParallelEmbedding:
    """Rows `first .. first + n - 1` of the embedding."""

    weight: Tensor  # [n, hidden]
    first: int
    ranks: Ranks

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`[T]` to `[T, hidden]`."""
        rows = self.weight.shape[0]
        if not rows:
            return self.ranks.all_reduce(self.weight.new_zeros(token_ids.shape[0], self.weight.shape[1]))
        local = token_ids - self.first
        elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.clamp(0, rows - 1), self.weight)
        return self.ranks.all_reduce(found.masked_fill_(elsewhere.unsqueeze(1), 0.0))


@dataclass(frozen=True, slots=True)
class Head:
    """The output head, whole."""

    linear: Linear  # hidden -> vocab

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, hidden]` to `[rows, vocab]`."""
        return self.linear(x)


@dataclass(frozen=True, slots=True)
class VocabularyParallelHead:
    """The output head for this rank's tokens. Parts of the logits are padded to one shape on their way."""

    linear: Linear  # hidden -> n
    vocab_size: int
    ranks: Ranks

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, hidden]` to all logits `[rows, vocab]` on rank 0, which alone samples; `[0, vocab]` elsewhere."""
        part = self.linear(x)
        padding = vocabulary_part(self.vocab_size, self.ranks) - part.shape[1]
        gathered = self.ranks.gather(F.pad(part, (0, padding)) if padding else part)
        if not gathered:
            return part.new_empty(0, self.vocab_size)
        return torch.cat(gathered, dim=1)[:, : self.vocab_size]
