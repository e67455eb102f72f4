"""Products of 8 bits: their numbers, exactness of integers, float8's short sums, and one result for one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.linear.splits import splits_of
from millstream_kernels.linear.w8a8 import w8a8_linear
from tests.support.kernel_launches import recording_launches
from tests.support.triton_interpreter import interpreting

pytestmark = pytest.mark.usefixtures("interpreter")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn


@dataclass(frozen=True)
class Quantized:
    """Codes and scales of random numbers; what is behind the end of a row is 1 or NaN."""

    x: Tensor
    x_scales: Tensor
    weight: Tensor
    weight_scales: Tensor

    @property
    def truth(self) -> Tensor:
        """`[M, N]`, float64."""
        a, w = self.x.double(), self.weight.double()
        if self.weight_scales.dim() == 1:
            return (a * self.x_scales.double()[:, None]) @ (w * self.weight_scales.double()[:, None]).T
        inputs, outputs = torch.arange(a.shape[1]) // 128, torch.arange(w.shape[0]) // 128
        wide = self.weight_scales.double()[outputs][:, inputs]
        return (a * self.x_scales.double()[:, inputs]) @ (w * wide).T

    def rows(self, chosen: list[int]) -> Quantized:
        return Quantized(self.x[chosen].clone(), self.x_scales[chosen].clone(), self.weight, self.weight_scales)

    def product(self, dtype: torch.dtype = FP32, bias: Tensor | None = None) -> Tensor:
        output = torch.full((self.x.shape[0], self.weight.shape[0]), torch.nan, dtype=dtype)
        return w8a8_linear(self.x, self.x_scales, self.weight, self.weight_scales, bias, output=output)


def make(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, *, blocks: bool = False) -> Quantized:
    random = torch.Generator().manual_seed(num_rows + num_inputs)

    def codes(rows: int) -> Tensor:
        behind = 1.0 if dtype == INT8 else torch.nan
        memory = torch.full((rows, num_inputs + 16), behind).to(dtype)
        memory[:, :num_inputs] = (torch.randn(rows, num_inputs, generator=random) * 40).clamp(-127, 127).to(dtype)
        return memory[:, :num_inputs]

    def scales(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random) * 0.01 + 0.001

    tiles = -(-num_inputs // 128)
    per_row, per_output = (
        ((num_rows, tiles), (-(-num_outputs // 128), tiles)) if blocks else ((num_rows,), (num_outputs,))
    )
    return Quantized(codes(num_rows), scales(*per_row), codes(num_outputs), scales(*per_output))


SWEEP = [
    (1, 128, 128, INT8, False),
    (3, 130, 1040, INT8, False),  # two splits; outputs and inputs beyond a tile
    (17, 8, 256, INT8, False),
    (65, 136, 272, INT8, False),
    (2, 24, 256, INT8, True),
    (1, 16, 144, FP8, False),
    (16, 130, 1024, FP8, False),
    (70, 40, 256, FP8, False),
    (5, 136, 1168, FP8, True),  # blocks that are not full, in both directions
    (66, 136, 384, FP8, True),
]


@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs", "dtype", "blocks"), SWEEP)
def test_it_is_right_within_the_rounding_of_float32(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, blocks: bool
) -> None:
    case = make(num_rows, num_outputs, num_inputs, dtype, blocks=blocks)
    result, truth = case.product(), case.truth
    assert ((result.double() - truth).abs() <= 2e-6 * truth.abs().max()).all()


def test_a_bias_is_added_before_the_one_rounding() -> None:
    assert splits_of(24, 1040).count == 2
    for num_rows in (2, 65):  # in splits, and in one program
        case = make(num_rows, 24, 1040, INT8)
        bias = torch.linspace(-3, 3, 24).to(BF16)
        expected = (case.product(FP32).double() + bias.double()).to(BF16)
        assert torch.equal(case.product(BF16, bias), expected)


def test_the_largest_sums_of_int8_do_not_overflow() -> None:
    case = Quantized(
        torch.full((2, 2048), -128, dtype=INT8), torch.ones(2), torch.full((16, 2048), -128, dtype=INT8), torch.ones(16)
    )
    assert (case.product() == 2048 * 128 * 128).all()


def test_a_long_sum_of_float8_is_promoted_to_float32_after_each_tile() -> None:
    """Trap: sm_90 keeps 14 bits of a running sum, and so does the interpreter here."""
    inputs = 2048
    x, weight = torch.full((1, inputs), 1.125).to(FP8), torch.full((16, inputs), 1.25).to(FP8)
    x[0, 0] = weight[:, 0] = 448
    for num_rows in (1, 65):  # in splits, and in one program
        case = Quantized(x.expand(num_rows, inputs).contiguous(), torch.ones(num_rows), weight, torch.ones(16))
        with interpreting(short_float8_sums=True):
            error = (case.product().double() / case.truth - 1).abs().max()
        assert error < 2**-13, f"{num_rows} rows: {error:.2e}"


@pytest.mark.parametrize(("dtype", "blocks"), [(INT8, False), (FP8, False), (FP8, True)])
def test_a_row_has_one_result_alone_and_in_company(dtype: torch.dtype, blocks: bool) -> None:
    case = make(64, 128, 1040, dtype, blocks=blocks)
    assert splits_of(128, 1040).count == 2
    together = case.product()
    for chosen in ([63], [*range(30, 46)]):
        assert torch.equal(case.rows(chosen).product(), together[chosen])


def test_a_scale_that_is_nan_spoils_its_own_row_alone() -> None:
    case = make(3, 24, 256, FP8)
    expected = case.product()
    case.x_scales[1] = torch.nan
    result = case.product()
    assert result[1].isnan().all()
    assert torch.equal(result[[0, 2]], expected[[0, 2]])


def test_no_rows_are_no_work() -> None:
    assert make(0, 24, 128, INT8).product().shape == (0, 24)


ONES = torch.ones(16)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("x", {"x": torch.zeros(2, 128, dtype=BF16)}),
        ("x", {"x": torch.zeros(2, 120, dtype=INT8)}),
        ("x", {"x": torch.zeros(2, 136, dtype=INT8)[:, :128]}),
        ("x", {"x": torch.zeros(2, 256, dtype=INT8)[:, ::2]}),
        ("weight", {"weight": torch.zeros(16, 128).to(FP8)}),
        ("weight", {"weight": torch.zeros(16, 256, dtype=INT8)}),
        ("x_scales", {"x_scales": torch.ones(2, 1)}),
        ("x_scales", {"x_scales": torch.ones(2, dtype=FP16)}),
        ("weight_scales", {"weight_scales": torch.ones(8)}),
        ("weight_scales", {"weight_scales": torch.ones(32)[::2]}),
        ("bias", {"bias": torch.zeros(16)}),
        ("output", {"output": torch.zeros(2, 16, dtype=INT8)}),
        ("output", {"output": torch.zeros(16, 2, dtype=BF16).T}),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(argument: str, change: dict[str, Any]) -> None:
    x, weight = torch.zeros(2, 128, dtype=INT8), torch.zeros(16, 128, dtype=INT8)
    arguments: dict[str, Any] = {"x": x, "x_scales": ONES[:2], "weight": weight, "weight_scales": ONES} | change
    with pytest.raises(KernelArgumentError) as caught:
        w8a8_linear(**arguments)
    assert caught.value.argument == argument


def test_production_starts_what_is_in_the_table() -> None:
    for dtype, blocks in ((INT8, False), (FP8, False), (FP8, True)):
        for num_rows in (1, 17, 65):
            case = make(num_rows, 128, 256, dtype, blocks=blocks)
            with recording_launches(executing=False) as launches:
                case.product(BF16)
            assert launches
            for launch in launches:
                assert launch.variant_names(), f"{launch} is compiled in service"
