"""Rows to codes of one byte: those of torch, rows of zeros and of NaN, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.elementwise.codes import Codes
from millstream_kernels.elementwise.quantize_rows import MAX_SIZE, quantize_rows
from tests.support.kernel_launches import recording_launches

pytestmark = pytest.mark.usefixtures("interpreter")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMITS = {Codes.INT8: 127.0, Codes.E4M3: 448.0}


def rows(count: int, size: int, dtype: torch.dtype) -> Tensor:
    """With a gap between rows, which is NaN."""
    memory = torch.full((count, size + 16), torch.nan, dtype=dtype)
    memory[:, :size] = torch.randn(count, size, generator=torch.Generator().manual_seed(size)) * 3
    return memory[:, :size]


@pytest.mark.parametrize("codes", Codes)
@pytest.mark.parametrize(("size", "dtype"), [(16, FP32), (272, BF16), (1040, FP16)])
def test_codes_are_torchs(size: int, dtype: torch.dtype, codes: Codes) -> None:
    x = rows(3, size, dtype)
    x[1] = 0.0
    found = quantize_rows(x, codes)
    scales = x.float().abs().amax(1) / LIMITS[codes]
    assert torch.equal(found.scales, scales)
    quotients = (x.float() / scales[:, None]).nan_to_num(0.0)
    wanted = quotients.round().to(torch.int8) if codes == Codes.INT8 else quotients.to(torch.float8_e4m3fn)
    assert torch.equal(found.codes.view(torch.uint8), wanted.view(torch.uint8))


def test_a_row_with_nan_is_nan_and_its_neighbour_is_not() -> None:
    x = rows(2, 64, FP32)
    x[0, 3] = torch.nan
    assert quantize_rows(x, Codes.INT8).scales.isnan().tolist() == [True, False]


@pytest.mark.parametrize("x", [torch.zeros(2, 24), torch.zeros(2, 32)[:, ::2], torch.zeros(1, MAX_SIZE + 16)])
def test_what_the_kernel_cannot_take_is_refused_by_name(x: Tensor) -> None:
    with pytest.raises(KernelArgumentError) as caught:
        quantize_rows(x, Codes.INT8)
    assert caught.value.argument == "x"


def test_production_starts_what_is_in_the_table() -> None:
    with recording_launches(executing=False) as launches:
        quantize_rows(torch.zeros(2, 4096, dtype=BF16), Codes.INT8)
    (launch,) = launches
    assert launch.variant_names() == ["4096-int8"]
    assert not quantize_rows(torch.zeros(0, 4096, dtype=BF16), Codes.INT8).codes.numel()
