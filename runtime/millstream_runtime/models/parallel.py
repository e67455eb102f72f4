"""Tensor-parallel layers: each rank keeps a share of a weight, and all ranks compute every token together.

Megatron's cut (Shoeybi et al. 2019, arXiv 1909.08053), two sums a layer:

    embedding   rows of the vocabulary         each rank looks up what it has, zeros elsewhere -> sum
    QKV, gate   columns: heads, hidden units   nothing to exchange
    output      rows: the same heads or units  partial results                                 -> sum
    head        columns: the vocabulary        a part of the logits                            -> gather

The arithmetic of shares is pure; `Ranks` is the only door to the other processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.models.linear import Linear


class Ranks(Protocol):
    """The processes that share a model, and which one this is."""

    rank: int
    size: int

    def sum_(self, partial: Tensor) -> Tensor:
        """The sum over all ranks, in place, on every rank."""

    def gather(self, part: Tensor) -> list[Tensor]:
        """What every rank gave, in their order, on every rank; all of one shape."""


class DistributedRanks:
    """A process group of torch: NCCL on GPUs, gloo on CPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def sum_(self, partial: Tensor) -> Tensor:
        dist.all_reduce(partial, group=self._group)
        return partial

    def gather(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self._group)
        return parts


def even_share(total: int, ranks: Ranks, what: str) -> slice:
    """This rank's part of `total` heads or units.

    Raises:
        InvalidConfigError: where they do not divide; `what` names them as config.json does.
    """
    if total % ranks.size:
        raise InvalidConfigError(
            f"--tensor-parallel-size is {ranks.size}; it must divide {what}, which is {total} in this model."
        )
    size = total // ranks.size
    return slice(ranks.rank * size, (ranks.rank + 1) * size)


def kv_head_share(num_kv_heads: int, ranks: Ranks) -> slice:
    """This rank's key and value heads. Where there are fewer than ranks, neighbours keep copies of the same one."""
    if num_kv_heads >= ranks.size or ranks.size % num_kv_heads:
        return even_share(num_kv_heads, ranks, "num_key_value_heads")
    head = ranks.rank * num_kv_heads // ranks.size
    return slice(head, head + 1)


def vocabulary_share(vocab_size: int, ranks: Ranks) -> slice:
    """This rank's tokens: equal parts, of which the last may be shorter or even empty."""
    size = -(-vocab_size // ranks.size)
    return slice(min(ranks.rank * size, vocab_size), min((ranks.rank + 1) * size, vocab_size))


def column_parallel(full: Linear, columns: list[slice]) -> Linear:
    """The outputs `columns` of a linear, one slice for each of the parts fused in it (queries, keys, values)."""
    weight = torch.cat([full.weight[:, part] for part in columns], dim=1)
    return Linear(weight, None if full.bias is None else torch.cat([full.bias[part] for part in columns]))


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """A linear whose inputs are spread over the ranks; every rank gets the whole output."""

    weight: Tensor  # [in of this rank, out]
    bias: Tensor | None  # [out], added once, after the sum
    ranks: Ranks

    @classmethod
    def of(cls, full: Linear, rows: slice, ranks: Ranks) -> RowParallelLinear:
        return cls(full.weight[rows].contiguous(), full.bias, ranks)

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in of this rank]` to `[T, out]`."""
        total = self.ranks.sum_(torch.mm(x, self.weight))
        return total if self.bias is None else total.add_(self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += self(x)`. Not as one product: the residual stream must be added once, not once a rank."""
        residual.add_(self(x))


@dataclass(frozen=True, slots=True)
class VocabularyParallelEmbedding:
    """Rows `first .. first + n - 1` of the embedding."""

    weight: Tensor  # [n, hidden]
    first: int
    ranks: Ranks

    @classmethod
    def of(cls, full: Tensor, ranks: Ranks) -> VocabularyParallelEmbedding:
        """`full`: `[vocab, hidden]`."""
        share = vocabulary_share(full.shape[0], ranks)
        return cls(full[share].contiguous(), share.start, ranks)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`[T]` to `[T, hidden]`."""
        rows = self.weight.shape[0]
        if not rows:
            return self.ranks.sum_(self.weight.new_zeros(token_ids.shape[0], self.weight.shape[1]))
        local = token_ids - self.first
        elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.clamp(0, rows - 1), self.weight)
        return self.ranks.sum_(found.masked_fill_(elsewhere.unsqueeze(1), 0.0))


@dataclass(frozen=True, slots=True)
class VocabularyParallelHead:
    """The output head for this rank's tokens, padded so that all ranks gather parts of one shape."""

    weight: Tensor  # [hidden, ceil(vocab / ranks)], zeros beyond the vocabulary
    vocab_size: int
    ranks: Ranks

    @classmethod
    def of(cls, full: Tensor, ranks: Ranks) -> VocabularyParallelHead:
        """`full`: `[hidden, vocab]`."""
        part = full[:, vocabulary_share(full.shape[1], ranks)]
        padding = -(-full.shape[1] // ranks.size) - part.shape[1]
        return cls(F.pad(part, (0, padding)).contiguous(), full.shape[1], ranks)

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, hidden]` to all logits `[rows, vocab]`, on every rank, so that all sample the same token."""
        return torch.cat(self.ranks.gather(torch.mm(x, self.weight)), dim=1)[:, : self.vocab_size]
