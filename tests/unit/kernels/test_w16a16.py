"""Products of up to 64 rows by weights of 16 bits: the numbers, and one result for one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.linear.splits import splits_of
from millstream_kernels.linear.w16a16 import MAX_ROWS, plan, unsupported, w16a16_linear
from tests.support.kernel_launches import recording_launches

pytestmark = pytest.mark.usefixtures("interpreter")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """Random numbers; what is behind the end of a row is NaN."""

    x: Tensor
    weight: Tensor  # [N, K]

    @property
    def truth(self) -> Tensor:
        return self.x.double() @ self.weight.double().T

    def product(self, bias: Tensor | None = None, rows: slice = slice(None)) -> Tensor:
        x = self.x[rows]
        output = torch.full((x.shape[0], self.weight.shape[0]), torch.nan, dtype=x.dtype)
        return w16a16_linear(x, self.weight, bias, output=output)


def make(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, padding: int = 8) -> Case:
    random = torch.Generator().manual_seed(num_rows + num_inputs)

    def padded(rows: int) -> Tensor:
        memory = torch.full((rows, num_inputs + padding), torch.nan, dtype=dtype)
        memory[:, :num_inputs] = torch.randn(rows, num_inputs, generator=random).to(dtype)
        return memory[:, :num_inputs]

    return Case(padded(num_rows), padded(num_outputs))


SWEEP = [
    (1, 128, 128, FP32, 0),
    (1, 24, 1096, BF16, 8),  # two splits; inputs that end within a tile
    (2, 130, 8, FP16, 16),  # outputs beyond a tile, inputs less than one
    (3, 8, 72, BF16, 8),
    (16, 136, 264, FP32, 24),
    (17, 130, 1032, FP16, 8),
    (33, 24, 200, BF16, 8),
    (64, 136, 1096, BF16, 0),
    (64, 8, 1032, FP32, 8),
]


@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs", "dtype", "padding"), SWEEP)
def test_its_error_is_at_most_twice_that_of_torch(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, padding: int
) -> None:
    case = make(num_rows, num_outputs, num_inputs, dtype, padding)
    truth = case.truth
    of_torch = (case.x.float() @ case.weight.float().T).to(dtype)
    allowed = 2 * float((of_torch.double() - truth).abs().max()) + 1e-6 * float(truth.abs().max())
    found = case.product()
    assert not found.isnan().any()
    assert float((found.double() - truth).abs().max()) <= allowed


@pytest.mark.parametrize("num_inputs", [264, 1040])
def test_a_bias_is_added_before_the_one_rounding(num_inputs: int) -> None:
    """Where a weight is split, and where it is not."""
    case = make(2, 24, num_inputs, BF16)
    bias = torch.linspace(-3, 3, 24).to(BF16)
    wide = Case(case.x.float(), case.weight.float()).product()
    assert torch.equal(case.product(bias), (wide.double() + bias.double()).to(BF16))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("num_inputs", "splits"), [(264, 1), (1040, 2)])
def test_a_row_has_one_result_alone_in_company_and_as_a_row_of_a_check(
    num_inputs: int, splits: int, dtype: torch.dtype
) -> None:
    case = make(MAX_ROWS, 136, num_inputs, dtype)
    assert splits_of(136, num_inputs).count == splits
    together = case.product()
    for rows in (slice(63, 64), slice(7, 9), slice(20, 25), slice(30, 46), slice(30, 47), slice(0, 33)):
        assert torch.equal(case.product(rows=rows), together[rows])


def test_how_a_weight_is_split_follows_from_its_shape_alone() -> None:
    for capability in (80, 86, 90, 100):
        plans = [plan(num_rows, 4096, 4096, capability) for num_rows in range(1, MAX_ROWS + 1)]
        assert {own.splits for own in plans} == {splits_of(4096, 4096)}
        assert all(own.block_rows >= num_rows for num_rows, own in enumerate(plans, start=1))


def test_a_row_of_nan_leaves_its_neighbours_alone() -> None:
    case = make(3, 24, 1040, BF16)
    before = case.product()
    case.x[1] = torch.nan
    after = case.product()
    assert after[1].isnan().all()
    assert torch.equal(after[::2], before[::2])


def test_no_rows_are_no_work() -> None:
    assert make(0, 24, 128, BF16).product().shape == (0, 24)


def test_one_row_may_lie_anywhere() -> None:
    """The distance to a next row that is not there says nothing."""
    memory = torch.randn(1, 131)
    x, weight = memory[:, :128], torch.randn(16, 128)
    torch.testing.assert_close(w16a16_linear(x, weight), x @ weight.T)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("x", {"x": torch.zeros(2, 128, dtype=torch.float64)}),
        ("x", {"x": torch.zeros(2, 124)}),
        ("x", {"x": torch.zeros(2, 0)}),
        ("x", {"x": torch.zeros(65, 128)}),
        ("x", {"x": torch.zeros(2, 132)[:, :128]}),
        ("x", {"x": torch.zeros(128, 2).T}),
        ("x", {"x": torch.zeros(2 * 128 + 1)[1:].view(2, 128)}),
        ("weight", {"weight": torch.zeros(16, 128, dtype=BF16)}),
        ("weight", {"weight": torch.zeros(16, 256)}),
        ("weight", {"weight": torch.zeros(0, 128)}),
        ("weight", {"weight": torch.zeros(128, 16).T}),
        ("weight", {"weight": torch.zeros(16, 132)[:, :128]}),
        ("weight", {"weight": torch.zeros(16, 128, device="meta")}),
        ("bias", {"bias": torch.zeros(16, dtype=BF16)}),
        ("bias", {"bias": torch.zeros(24)}),
        ("output", {"output": torch.zeros(16, 2).T}),
        ("output", {"output": torch.zeros(2, 24)}),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(argument: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(2, 128), "weight": torch.zeros(16, 128)} | change
    with pytest.raises(KernelArgumentError) as caught:
        w16a16_linear(**arguments)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (torch.zeros(16, 128), None),
        (torch.zeros(16, 128, dtype=torch.float64), "dtype float64"),
        (torch.zeros(128, 16).T, "inputs of an output do not follow one another"),
        (torch.zeros(16, 12), "rows of 12 inputs, 12 apart: multiples of 8 are supported"),
        (torch.zeros(0, 16), "no outputs or no inputs"),
    ],
)
def test_a_weight_that_it_does_not_take_has_a_reason(weight: Tensor, reason: str | None) -> None:
    assert unsupported(weight) == reason


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_production_starts_what_is_in_the_table(dtype: torch.dtype) -> None:
    for num_rows in (1, 17, 64):
        for num_inputs in (256, 1024):
            case = make(num_rows, 128, num_inputs, dtype)
            with recording_launches(executing=False) as launches:
                case.product()
            assert [launch.kernel for launch in launches] == ["w16a16_product", "sum_splits"][
                : num_inputs // 256 // 2 + 1
            ]
            for launch in launches:
                assert launch.variant_names(), f"{launch} is compiled in service"
