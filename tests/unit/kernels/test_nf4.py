"""Products by weights in NF4: the codes in their order, scales of 8 bits, and one result for one row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.linear.nf4 import NestedScales, Nf4Weight, nf4_linear
from millstream_kernels.linear.splits import splits_of
from millstream_runtime.quantization.nf4 import NF4_VALUES
from tests.support.kernel_launches import recording_launches

pytestmark = pytest.mark.usefixtures("interpreter")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """Random numbers; what is behind the end of a row of x is NaN."""

    x: Tensor
    weight: Nf4Weight

    @property
    def wide(self) -> Tensor:
        """The weight `[N, K]`, float64."""
        weight = self.weight
        codes = torch.stack((weight.codes >> 4, weight.codes & 15), dim=2).flatten(1).long()
        scales = weight.absmax.double()
        if weight.nested is not None:
            nested = weight.nested.absmax.double().repeat_interleave(256)[: scales.numel()].view(scales.shape)
            scales = weight.nested.table.double()[weight.absmax.long()] * nested + weight.nested.offset
        return weight.values.double()[codes] * scales.repeat_interleave(64, 1)

    def product(self, bias: Tensor | None = None, rows: slice = slice(None)) -> Tensor:
        x = self.x[rows]
        return nf4_linear(x, self.weight, bias, output=torch.full((len(x), len(self.weight.codes)), torch.nan).to(x))


def make(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, *, nested: bool = False) -> Case:
    random = torch.Generator().manual_seed(num_rows + num_inputs)
    memory = torch.full((num_rows, num_inputs + 8), torch.nan, dtype=dtype)
    memory[:, :num_inputs] = torch.randn(num_rows, num_inputs, generator=random)
    groups = (num_outputs, num_inputs // 64)
    absmax, scales = torch.rand(groups, generator=random) + 0.01, None
    if nested:
        absmax = torch.randint(0, 256, groups, generator=random, dtype=torch.uint8)
        count = -(-absmax.numel() // 256)
        scales = NestedScales(torch.linspace(-1, 1, 256), torch.rand(count, generator=random) + 0.1, 0.7)
    codes = torch.randint(0, 256, (num_outputs, num_inputs // 2), generator=random, dtype=torch.uint8)
    return Case(memory[:, :num_inputs], Nf4Weight(codes, absmax, torch.tensor(NF4_VALUES), scales))


SWEEP = [
    (1, 128, 64, FP32, False),
    (3, 130, 1088, BF16, True),  # two splits; a nested scale ends within a row
    (17, 8, 192, FP16, False),
    (66, 24, 128, BF16, True),
    (2, 136, 1024, FP16, True),
]


@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs", "dtype", "nested"), SWEEP)
def test_its_error_is_at_most_twice_that_of_a_dequantized_product(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, nested: bool
) -> None:
    case = make(num_rows, num_outputs, num_inputs, dtype, nested=nested)
    truth = case.x.double() @ case.wide.T
    of_torch = (case.x.float() @ case.wide.to(dtype).float().T).to(dtype).double()
    allowed = 2 * float((of_torch - truth).abs().max()) + 1e-6 * float(truth.abs().max())
    assert float((case.product().double() - truth).abs().max()) <= allowed


def test_the_first_of_two_inputs_lies_above() -> None:
    """Each input's own code: by a one in x, all of them at once."""
    case = make(64, 16, 64, FP32)
    found = Case(torch.eye(64), case.weight).product()
    assert torch.equal(found, case.wide.T.float())


def test_a_bias_is_added_before_the_one_rounding() -> None:
    case = make(2, 24, 128, FP32)
    bias = torch.linspace(-3, 3, 24)
    assert torch.equal(case.product(bias), case.product() + bias)


@pytest.mark.parametrize("nested", [False, True])
def test_a_row_has_one_result_alone_in_company_and_in_a_prompt(nested: bool) -> None:
    case = make(66, 16, 1088, BF16, nested=nested)
    assert splits_of(16, 1088).count == 2
    together = case.product()
    for rows in (slice(63, 64), slice(30, 47)):
        assert torch.equal(case.product(rows=rows), together[rows])


def test_no_rows_are_no_work() -> None:
    assert make(0, 24, 128, BF16).product().shape == (0, 24)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("codes", {"codes": torch.zeros(16, 48, dtype=torch.uint8)}),
        ("codes", {"codes": torch.zeros(16, 64, dtype=torch.int8)}),
        ("codes", {"codes": torch.zeros(64, 16, dtype=torch.uint8).T}),
        ("absmax", {"absmax": torch.ones(16, 3)}),
        ("absmax", {"absmax": torch.ones(16, 2, dtype=torch.uint8)}),
        ("values", {"values": torch.ones(8)}),
        (
            "nested.absmax",
            {"absmax": torch.ones(16, 2).byte(), "nested": NestedScales(torch.ones(256), torch.ones(2), 0)},
        ),
        (
            "nested.table",
            {"absmax": torch.ones(16, 2).byte(), "nested": NestedScales(torch.ones(16), torch.ones(1), 0)},
        ),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(argument: str, change: dict[str, Any]) -> None:
    weight = Nf4Weight(torch.zeros(16, 64, dtype=torch.uint8), torch.ones(16, 2), torch.tensor(NF4_VALUES))
    with pytest.raises(KernelArgumentError) as caught:
        nf4_linear(torch.zeros(2, 128), replace(weight, **change))
    assert caught.value.argument == argument
    for name, x in (("x", torch.zeros(2, 64)), ("x", torch.zeros(2, 256)[:, ::2])):
        with pytest.raises(KernelArgumentError) as caught:
            nf4_linear(x, weight)
        assert caught.value.argument == name


def test_production_starts_what_is_in_the_table() -> None:
    for nested in (False, True):
        for num_rows in (1, 17, 65):
            case = make(num_rows, 128, 1024, BF16, nested=nested)
            with recording_launches(executing=False) as launches:
                case.product()
            assert launches
            for launch in launches:
                assert launch.variant_names(), f"{launch} is compiled in service"
