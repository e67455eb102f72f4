"""The RMS norms of the layers against torch's own, on every layout and type that a model gives them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from millstream_runtime.models.layers.norm import HeadNorm, RmsNorm


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4])  # eps rules the smallest, and nothing overflows
def test_rows_are_normed_as_torch_does(dtype: torch.dtype, tolerance: float, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(3)
    # A mean far from zero is what tells this norm from a layer norm.
    x = (torch.randn(5, 100, generator=generator, dtype=dtype) + 3.0) * magnitude
    weight = torch.randn(100, generator=generator, dtype=dtype)
    expected = F.rms_norm(x, (100,), weight, 1e-5)
    torch.testing.assert_close(RmsNorm(weight, 1e-5)(x), expected, rtol=tolerance, atol=tolerance)
    strided = torch.cat((x, x), dim=1)[:, 50:150]
    torch.testing.assert_close(
        RmsNorm(weight, 1e-5)(strided), F.rms_norm(strided, (100,), weight, 1e-5), rtol=tolerance, atol=tolerance
    )


def test_sixteen_bits_are_rounded_once() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(7, 96, generator=generator).bfloat16()
    weight = torch.randn(96, generator=generator)
    exact = F.rms_norm(x.double(), (96,), weight.double(), 1e-6)
    normed = RmsNorm(weight, 1e-6)(x)
    assert normed.dtype == torch.bfloat16
    assert torch.equal(normed, exact.bfloat16())


def test_each_head_has_its_own_weight() -> None:
    generator = torch.Generator().manual_seed(5)
    heads, weight = torch.randn(4, 6, 16, generator=generator), torch.randn(6, 16, generator=generator)
    expected = torch.stack([F.rms_norm(heads[:, i], (16,), weight[i], 1e-6) for i in range(6)], dim=1)
    torch.testing.assert_close(HeadNorm(weight, 1e-6)(heads), expected)
