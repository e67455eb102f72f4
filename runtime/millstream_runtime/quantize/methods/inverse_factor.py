"""The factor of inverse moments that GPTQ rounds by, computed in the memory of the moments themselves.

With M the damped second moments in the order of rounding, GPTQ needs U, upper triangular, with U^T U = inv(M). Let J
reverse the order. The Cholesky factor L of J M J = L L^T gives U = J inv(L) J: one factorisation and one triangular
inverse, in place, where inverting M and factoring that takes three matrices of its size. For the widest module of a
layer that matrix is nearly as large as the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STRIP = 256  # rows or columns at once
DAMPING_STEPS = 4  # each ten times the one before


@dataclass(frozen=True, slots=True)
class InverseFactor:
    """`reversed_factor`: inv(L), float32 `[in, in]`, lower triangular, in the reverse of the order of rounding."""

    reversed_factor: Tensor

    def rows(self, start: int, stop: int) -> Tensor:
        """U[start:stop, start:], a copy `[stop - start, in - start]`."""
        last = len(self.reversed_factor)
        return self.reversed_factor[last - stop : last - start, : last - start].flip(0, 1)


def inverse_factor(moments: Tensor, order: Tensor, damping: float) -> InverseFactor | None:
    """Return the factor, or None where even strong damping leaves the moments singular.

    Args:
        moments: float32 `[in, in]`; becomes the factor.
        order: int64 `[in]`, the inputs in the order of rounding.
        damping: is added to the diagonal.
    """
    _permute(moments, order.flip(0))
    diagonal = moments.diagonal().clone()
    for step in range(DAMPING_STEPS):
        if step:
            _restore(moments)
        moments.diagonal().copy_(diagonal + damping * 10**step)
        if _factor(moments):
            break
    else:
        return None
    _invert(moments.tril_())
    return InverseFactor(moments) if bool(torch.isfinite(moments.sum())) else None


def _permute(matrix: Tensor, order: Tensor) -> None:
    """Rows and columns of a square matrix."""
    for start in range(0, len(matrix), STRIP):
        rows = matrix[start : start + STRIP]
        rows.copy_(rows.index_select(1, order))
    for start in range(0, len(matrix), STRIP):
        columns = matrix[:, start : start + STRIP]
        columns.copy_(columns.index_select(0, order))


def _restore(matrix: Tensor) -> None:
    """Write the part above the diagonal, which `_factor` leaves alone, below it again."""
    for start in range(0, len(matrix), STRIP):
        stop = min(start + STRIP, len(matrix))
        matrix[start:stop, :start] = matrix[:start, start:stop].t()
        corner = matrix[start:stop, start:stop]
        corner.copy_(corner.triu() + corner.triu(1).t())


def _factor(matrix: Tensor) -> bool:
    """Replace the lower triangle of a symmetric matrix by its Cholesky factor; False where it has none."""
    size = len(matrix)
    for start in range(0, size, STRIP):
        stop = min(start + STRIP, size)
        corner = matrix[start:stop, start:stop]
        lower, failed = torch.linalg.cholesky_ex(corner)
        if int(failed) or not bool(torch.isfinite(lower).all()):
            return False
        corner.copy_(corner.triu(1) + lower)
        below = matrix[stop:, start:stop]
        below.copy_(torch.linalg.solve_triangular(lower.mT, below, upper=True, left=False))
        for column in range(stop, size, STRIP):
            end = min(column + STRIP, size)
            later = matrix[column:, column:end]
            _subtract_below(later, below[column - stop :], below[column - stop : end - stop])
    return True


def _subtract_below(columns: Tensor, left: Tensor, right: Tensor) -> None:
    """`columns` -= left @ right^T, but for what is above the diagonal of the matrix that they belong to."""
    width = columns.shape[1]
    corner = columns[:width]
    corner.copy_(corner.triu(1) + (corner - left[:width] @ right.t()).tril())
    columns[width:].addmm_(left[width:], right.t(), alpha=-1)


def _invert(lower: Tensor) -> None:
    """Replace a lower triangular matrix by its inverse, from the last columns to the first."""
    size = len(lower)
    for start in reversed(range(0, size, STRIP)):
        stop = min(start + STRIP, size)
        corner = lower[start:stop, start:stop]
        identity = torch.eye(stop - start, device=lower.device)
        inverse = torch.linalg.solve_triangular(corner, identity, upper=False)
        below = lower[stop:, start:stop]
        for end in reversed(range(0, size - stop, STRIP)):
            # Rows of the last strip first: each needs the rows above it as they were.
            rows = slice(end, min(end + STRIP, size - stop))
            known = lower[stop:, stop:][rows, : rows.stop]
            below[rows] = -(known @ below[: rows.stop]) @ inverse
        corner.copy_(inverse)
