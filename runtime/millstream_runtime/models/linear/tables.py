"""The table of an embedding: rows by number, in the numbers that the model computes with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream_runtime.models.linear.linear import Linear


class Table(Protocol):
    """`[rows, hidden]`."""

    @property
    def num_rows(self) -> int: ...

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows (int64 `[T]`) as `[T, hidden]`, in the model's dtype."""

    def as_head(self) -> Linear | None:
        """The output head of a model that ties it to this table, of the same memory; None: the caller makes one."""


@dataclass(frozen=True, slots=True)
class DenseTable:
    """See `Table`. A `weight` of fewer bits is widened row by row."""

    weight: Tensor  # [rows, hidden]
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        return self.weight.shape[0]

    def __call__(self, rows: Tensor) -> Tensor:
        return F.embedding(rows, self.weight).to(self.dtype)

    def as_head(self) -> Linear | None:
        return None
