"""Which part of a model each tensor-parallel rank keeps. Arithmetic only: no torch, no processes.

The partition of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053):

    heads, hidden units    equal parts, or the size is refused
    key and value heads    equal parts; where ranks are more, neighbours keep copies of the same head
    vocabulary             equal parts, of which the last may be shorter or even empty
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.models.config.model_config import ModelConfig


class RankInfo(Protocol):
    """Which rank of how many."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Cut:
    """The ranges `kept` of `total` rows or columns of a checkpoint's tensor, one after another."""

    total: int
    kept: tuple[range, ...]

    @property
    def size(self) -> int:
        """How many are kept."""
        return sum(map(len, self.kept))

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return self.size == self.total


Size = int | Cut  # of a tensor in the checkpoint along one dimension: all of it, or what this rank keeps


def kept_size(size: Size) -> int:
    """Return how many of them this rank keeps."""
    return size if isinstance(size, int) else size.size


def total_size(size: Size) -> int:
    """Return how many the checkpoint has."""
    return size if isinstance(size, int) else size.total


def side_by_side(sizes: Sequence[int], shares: Sequence[range]) -> Cut:
    """Return the share of each of several tensors that a checkpoint keeps fused in one, of `sizes` rows each."""
    kept, start = [], 0
    for size, share in zip(sizes, shares, strict=True):
        kept.append(range(start + share.start, start + share.stop))
        start += size
    return Cut(start, tuple(kept))


def even_share(total: int, ranks: RankInfo, what: str) -> range:
    """Return this rank's part of `total` heads or units.

    Raises:
        InvalidConfigError: where they do not divide; `what` names them as config.json does.
    """
    if total % ranks.size:
        raise InvalidConfigError(
            f"--tensor-parallel-size is {ranks.size}; it must divide {what}, which is {total} in this model."
        )
    size = total // ranks.size
    return range(ranks.rank * size, (ranks.rank + 1) * size)


def kv_head_share(num_kv_heads: int, ranks: RankInfo) -> range:
    """This rank's key and value heads. Where there are fewer than ranks, neighbours keep copies of the same one.

    Raises:
        InvalidConfigError: neither number divides the other.
    """
    if num_kv_heads >= ranks.size or ranks.size % num_kv_heads:
        return even_share(num_kv_heads, ranks, "num_key_value_heads")
    head = ranks.rank * num_kv_heads // ranks.size
    return range(head, head + 1)


def vocabulary_share(vocab_size: int, ranks: RankInfo) -> range:
    """This rank's tokens: equal parts, of which the last may be shorter or even empty."""
    size = vocabulary_part(vocab_size, ranks)
    return range(min(ranks.rank * size, vocab_size), min((ranks.rank + 1) * size, vocab_size))


def vocabulary_part(vocab_size: int, ranks: RankInfo) -> int:
    """Tokens of a full part."""
    return -(-vocab_size // ranks.size)


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of one rank."""

    query: range
    kv: range
    head_dim: int

    @property
    def num_query(self) -> int:
        return len(self.query)

    @property
    def num_kv(self) -> int:
        return len(self.kv)

    def elements(self, heads: range) -> range:
        """Rows of a projection's weight that make these heads."""
        return range(heads.start * self.head_dim, heads.stop * self.head_dim)


def heads_of(config: ModelConfig, ranks: RankInfo) -> Heads:
    """This rank's query heads, and the key and value heads that these attend to.

    Raises:
        InvalidConfigError: the heads do not divide.
    """
    query = even_share(config.num_heads, ranks, "num_attention_heads")
    return Heads(query, kv_head_share(config.num_kv_heads, ranks), config.head_dim)


def rank_config(config: ModelConfig, ranks: RankInfo) -> ModelConfig:
    """The shape of one rank's share, as its KV cache sees it: fewer heads. A latent (MLA) has none."""
    if ranks.size == 1:
        return config
    heads = heads_of(config, ranks)
    return replace(config, num_heads=heads.num_query, num_kv_heads=heads.num_kv)
