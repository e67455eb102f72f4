"""What linears share whose code cannot add to a tensor that is there: the product is computed whole, then added."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class AddedProduct(ABC):
    """The part of a `Projection` that follows from its product."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`."""

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += self(x)` in place."""
        residual.add_(self(x))
