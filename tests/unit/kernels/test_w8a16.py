"""Products of 16-bit activations by 8-bit weights: every code, the numbers, and one result for one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.linear.splits import splits_of
from millstream_kernels.linear.w8a16 import w8a16_linear
from tests.support.kernel_launches import recording_launches

pytestmark = pytest.mark.usefixtures("interpreter")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """Random numbers; what is behind the end of a row is NaN, or a large code."""

    x: Tensor
    codes: Tensor  # int8 or float8
    scales: Tensor
    group_size: int | None = None

    @property
    def wide(self) -> Tensor:
        """The weight `[N, K]`, float64."""
        groups = torch.arange(self.codes.shape[1]) // (self.group_size or self.codes.shape[1])
        return self.codes.double() * self.scales.double()[groups].T

    @property
    def truth(self) -> Tensor:
        return self.x.double() @ self.wide.T

    def product(self, bias: Tensor | None = None, rows: slice = slice(None)) -> Tensor:
        x = self.x[rows]
        output = torch.full((x.shape[0], self.codes.shape[0]), torch.nan, dtype=x.dtype)
        codes = self.codes if self.codes.dtype == INT8 else self.codes.view(torch.uint8)
        return w8a16_linear(x, codes, self.scales, bias, group_size=self.group_size, output=output)


def make(
    num_rows: int, num_outputs: int, num_inputs: int, codes: torch.dtype, dtype: torch.dtype, group: int | None = None
) -> Case:
    random = torch.Generator().manual_seed(num_rows + num_inputs)

    def padded(rows: int, scale: float, kind: torch.dtype) -> Tensor:
        memory = torch.full((rows, num_inputs + 16), 120.0 if kind in (INT8, FP8) else torch.nan).to(kind)
        memory[:, :num_inputs] = (torch.randn(rows, num_inputs, generator=random) * scale).clamp(-127, 127).to(kind)
        return memory[:, :num_inputs]

    groups = -(-num_inputs // (group or num_inputs))
    scales = torch.rand(groups, num_outputs, generator=random) * 0.01 + 0.001
    return Case(padded(num_rows, 1.0, dtype), padded(num_outputs, 40.0, codes), scales, group)


SWEEP = [
    (1, 128, 128, INT8, FP32, None),
    (3, 130, 1040, INT8, BF16, None),  # two splits; outputs and inputs beyond a tile
    (17, 8, 272, INT8, FP16, 128),  # the last group is shorter
    (65, 136, 272, FP8, BF16, None),
    (2, 24, 1280, FP8, FP32, 128),
    (16, 130, 1024, FP8, FP16, 256),
    (66, 24, 16, FP8, BF16, None),
]


@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs", "codes", "dtype", "group"), SWEEP)
def test_its_error_is_at_most_twice_that_of_a_dequantized_product(
    num_rows: int, num_outputs: int, num_inputs: int, codes: torch.dtype, dtype: torch.dtype, group: int | None
) -> None:
    case = make(num_rows, num_outputs, num_inputs, codes, dtype, group)
    truth = case.truth
    of_torch = case.x.float() @ case.wide.to(dtype).float().T
    allowed = 2 * float((of_torch.to(dtype).double() - truth).abs().max()) + 1e-6 * float(truth.abs().max())
    assert float((case.product().double() - truth).abs().max()) <= allowed


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("codes", [INT8, FP8])
def test_every_code_has_its_value(codes: torch.dtype, dtype: torch.dtype) -> None:
    """The largest, the subnormal ones and both zeros: times 1, a sum of one number is exact."""
    bits = torch.tensor([one for one in range(256) if codes == INT8 or one & 0x7F != 0x7F], dtype=torch.uint8)
    weight = torch.zeros(len(bits), 16, dtype=torch.uint8)
    weight[:, 3] = bits
    case = Case(torch.ones(1, 16, dtype=dtype), weight.view(codes), torch.ones(1, len(bits)))
    assert torch.equal(case.product()[0].double(), bits.view(codes).double())


def test_a_bias_is_added_before_the_one_rounding() -> None:
    for num_rows in (2, 65):
        case = make(num_rows, 24, 256, INT8, BF16)
        bias = torch.linspace(-3, 3, 24).to(BF16)
        wide = Case(case.x.float(), case.codes, case.scales).product()
        assert torch.equal(case.product(bias), (wide.double() + bias.double()).to(BF16))


@pytest.mark.parametrize("codes", [INT8, FP8])
def test_a_row_has_one_result_alone_in_company_and_in_a_prompt(codes: torch.dtype) -> None:
    case = make(66, 128, 1040, codes, BF16, 128)
    assert splits_of(128, 1040).count == 2
    together = case.product()
    for rows in (slice(63, 64), slice(30, 47), slice(0, 64)):
        assert torch.equal(case.product(rows=rows), together[rows])


def test_no_rows_are_no_work() -> None:
    assert make(0, 24, 128, INT8, BF16).product().shape == (0, 24)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("x", {"x": torch.zeros(2, 128, dtype=torch.float64)}),
        ("x", {"x": torch.zeros(2, 120)}),
        ("x", {"x": torch.zeros(2, 136)[:, :128]}),
        ("weight", {"weight": torch.zeros(16, 128).to(FP8)}),
        ("weight", {"weight": torch.zeros(16, 256, dtype=INT8)}),
        ("weight", {"weight": torch.zeros(128, 16, dtype=INT8).T}),
        ("group_size", {"group_size": 64}),
        ("scales", {"scales": torch.ones(16)}),
        ("scales", {"scales": torch.ones(1, 16, dtype=FP16)}),
        ("scales", {"scales": torch.ones(1, 32)[:, ::2]}),
        ("bias", {"bias": torch.zeros(16, dtype=BF16)}),
        ("output", {"output": torch.zeros(16, 2).T}),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(argument: str, change: dict[str, Any]) -> None:
    x, weight = torch.zeros(2, 128), torch.zeros(16, 128, dtype=INT8)
    arguments: dict[str, Any] = {"x": x, "weight": weight, "scales": torch.ones(1, 16)} | change
    with pytest.raises(KernelArgumentError) as caught:
        w8a16_linear(**arguments)
    assert caught.value.argument == argument


def test_production_starts_what_is_in_the_table() -> None:
    for codes in (INT8, FP8):
        for num_rows in (1, 17, 65):
            case = make(num_rows, 128, 256, codes, BF16)
            with recording_launches(executing=False) as launches:
                case.product()
            assert launches
            for launch in launches:
                assert launch.variant_names(), f"{launch} is compiled in service"
