"""On a GPU: a row of a product has one result, alone, in company and as a row of a draft's check, in every bit.

What the kernels take for granted: that a matrix unit sums 16 inputs alike for tiles of 16 and of 64 rows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from millstream_kernels.linear.int4_weight import repack
from millstream_kernels.linear.nf4 import GROUP, Nf4Weight, nf4_linear
from millstream_kernels.linear.w4a16 import w4a16_linear
from millstream_kernels.linear.w8a16 import w8a16_linear
from millstream_kernels.linear.w16a16 import MAX_ROWS, w16a16_linear

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
SHAPES = ((4096, 4096), (1000, 4096), (28672, 1024), (136, 1104))  # outputs and inputs; some are split, some end early
TAKEN = (slice(0, 1), slice(63, 64), slice(7, 9), slice(20, 25), slice(30, 46), slice(30, 47), slice(0, 33))
Product = Callable[[Tensor], Tensor]


def _w16a16(outputs: int, inputs: int, dtype: torch.dtype) -> Product:
    weight = torch.randn(outputs, inputs, device=DEVICE).to(dtype)
    return lambda x: w16a16_linear(x, weight)


def _w8a16(outputs: int, inputs: int, dtype: torch.dtype) -> Product:
    codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=DEVICE)
    scales = torch.rand(1, outputs, device=DEVICE)
    return lambda x: w8a16_linear(x, codes, scales)


def _w4a16(outputs: int, inputs: int, dtype: torch.dtype) -> Product:
    codes = torch.randint(0, 16, (inputs, outputs), dtype=torch.uint8, device=DEVICE)
    scales = torch.rand(-(-inputs // 128), outputs, device=DEVICE).half()
    weight = repack(codes, scales, 8, 128)
    return lambda x: w4a16_linear(x, weight)


def _nf4(outputs: int, inputs: int, dtype: torch.dtype) -> Product:
    inputs = inputs // GROUP * GROUP
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=DEVICE)
    absmax = torch.rand(outputs, inputs // GROUP, device=DEVICE)
    weight = Nf4Weight(codes, absmax, torch.linspace(-1, 1, 16, device=DEVICE))
    return lambda x: nf4_linear(x[:, :inputs], weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [_w16a16, _w8a16, _w4a16, _nf4])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_row_has_one_result(
    outputs: int, inputs: int, make: Callable[[int, int, torch.dtype], Product], dtype: torch.dtype
) -> None:
    torch.manual_seed(outputs)
    product, x = make(outputs, inputs, dtype), torch.randn(MAX_ROWS, inputs, device=DEVICE).to(dtype)
    together = product(x)
    assert together.isfinite().all()
    for rows in TAKEN:
        assert torch.equal(product(x[rows]), together[rows]), rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 64])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_its_error_is_at_most_twice_that_of_torch(outputs: int, inputs: int, num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    weight, x = (torch.randn(rows, inputs, device=DEVICE).to(dtype) for rows in (outputs, num_rows))
    truth = x.double() @ weight.double().T
    allowed = 2 * float((torch.mm(x, weight.T).double() - truth).abs().max())
    assert float((w16a16_linear(x, weight).double() - truth).abs().max()) <= allowed
