"""Tensor-parallel layers (Megatron: Shoeybi et al. 2019, arXiv 1909.08053): each rank keeps a share of a weight.

    embedding   rows of the vocabulary         each rank looks up what it has, zeros elsewhere -> sum
    QKV, gate   columns: heads, hidden units   nothing to exchange
    output      rows: the same heads or units  partial results                                 -> sum
    head        columns: the vocabulary        a part of the logits                            -> gathered by rank 0

Two sums per layer. A sum is the same, bit for bit, on every rank: so what follows from it (norms, the experts that a
router chooses) is computed by each rank and never exchanged. `Ranks` is the only interface to the other
processes; `shares` says which rank keeps which part.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream_runtime.models.linear.added_product import AddedProduct
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.models.linear.shares import vocabulary_part
from millstream_runtime.models.linear.tables import Table


class Ranks(Protocol):
    """The processes that share a model, and which one this is."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum `partial` over all ranks in place, and return it: the same bits on every rank."""

    def gather(self, part: Tensor) -> list[Tensor]:
        """Return on rank 0 the `part` of every rank, in their order; elsewhere nothing. All have one shape."""

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite the `tensor` of every other rank with rank 0's. All have one shape and dtype."""

    def alone(self) -> AbstractContextManager[None]:
        """Exchange nothing meanwhile: a rank computes with its own part alone, for a result that nobody uses."""


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """A single rank: no other processes."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def gather(self, part: Tensor) -> list[Tensor]:
        return [part]

    def broadcast(self, tensor: Tensor) -> None:
        return

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True, slots=True)
class PlannedRanks:
    """A rank that does not run yet: enough to find what it would load, and to refuse what cannot be divided."""

    rank: int
    size: int

    def all_reduce(self, partial: Tensor) -> Tensor:
        raise NotImplementedError

    def gather(self, part: Tensor) -> list[Tensor]:
        raise NotImplementedError

    def broadcast(self, tensor: Tensor) -> None:
        raise NotImplementedError

    def alone(self) -> AbstractContextManager[None]:
        raise NotImplementedError


SINGLE_PROCESS = SingleProcess()


@dataclass(frozen=True, slots=True)
class RowParallelLinear(AddedProduct):
    """A linear whose inputs are spread over the ranks; every rank gets the whole output.

    `add_to` is not one product: the residual stream must be added once, not once a rank.
    """

    part: Linear  # in of this rank -> out, without the bias
    bias: Tensor | None  # [out], added once, after the sum
    ranks: Ranks

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in of this rank]` to `[T, out]`."""
        total = self.ranks.all_reduce(self.part(x))
        return total if self.bias is None else total.add_(self.bias)


@dataclass(frozen=True, slots=True)
class Embedding:
    """`[vocab, hidden]`, whole."""

    table: Table

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`[T]` to `[T, hidden]`."""
        return self.table(token_ids)


@dataclass(frozen=True, slots=True)
class VocabularyParallelEmbedding:
    """Rows `first .. first + n - 1` of the embedding."""

    table: Table  # of n rows
    first: int
    hidden_size: int
    ranks: Ranks

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`[T]` to `[T, hidden]`."""
        rows = self.table.num_rows
        if not rows:
            none = self.table(token_ids[:0])  # of the model's type
            return self.ranks.all_reduce(none.new_zeros(token_ids.shape[0], self.hidden_size))
        local = token_ids - self.first
        elsewhere = (local < 0) | (local >= rows)
        found = self.table(local.clamp(0, rows - 1))
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
