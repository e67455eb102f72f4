"""GPTQ's factor of the inverse moments, made in their own memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millstream_runtime.quantize.methods import inverse_factor
from tests.support.allocated_memory import peak_bytes

SIZES = (1, 7, 256, 600)  # within a strip, one, and some that end within one


def moments_of(size: int) -> tuple[Tensor, Tensor]:
    """Of correlated inputs, and an order."""
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(2 * size, size, generator=generator) @ torch.randn(size, size, generator=generator)
    return rows.t() @ rows / (2 * size), torch.randperm(size, generator=generator)


@pytest.mark.parametrize("size", SIZES)
def test_its_product_is_the_inverse_in_the_order_of_rounding(size: int) -> None:
    moments, order = moments_of(size)
    damping = float(moments.diagonal().mean())
    damped = moments[order][:, order].double() + damping * torch.eye(size, dtype=torch.float64)
    found = inverse_factor.inverse_factor(moments.clone(), order, damping)
    assert found is not None
    upper = found.rows(0, size).double()
    assert torch.equal(upper, upper.triu())
    assert torch.allclose(upper.t() @ upper @ damped, torch.eye(size, dtype=torch.float64), atol=1e-3)


def test_rows_are_those_of_the_whole() -> None:
    found = inverse_factor.inverse_factor(*moments_of(600), damping=1.0)
    assert found is not None
    whole = found.rows(0, 600)
    assert torch.equal(found.rows(100, 228), whole[100:228, 100:])
    assert torch.equal(found.rows(500, 600), whole[500:600, 500:])


def test_more_damping_is_tried_where_the_moments_are_singular() -> None:
    """The first damping is lost in rounding; the values for the second try are those from before the first."""
    size = 600
    row = torch.randn(1, size, generator=torch.Generator().manual_seed(0))
    moments, order = 1e6 * row.t() @ row, torch.arange(size)
    found = inverse_factor.inverse_factor(moments.clone(), order, damping=1.0)
    assert found is not None
    damped = [moments.double() + 10.0**step * torch.eye(size, dtype=torch.float64) for step in range(4)]
    product = found.rows(0, size).double()
    errors = [float((product.t() @ product @ one - torch.eye(size)).abs().max()) for one in damped]
    assert min(errors[1:]) < 0.3


def test_moments_that_are_not_finite_give_none() -> None:
    assert inverse_factor.inverse_factor(torch.full((300, 300), float("nan")), torch.arange(300), damping=1.0) is None


def test_it_takes_no_second_matrix() -> None:
    moments, order = moments_of(1)[0].expand(2048, 2048) + torch.eye(2048), torch.arange(2048)
    assert peak_bytes(lambda: inverse_factor.inverse_factor(moments, order, damping=1.0)) < 0.5 * moments.nbytes
