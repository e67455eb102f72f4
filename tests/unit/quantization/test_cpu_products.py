"""Layers that a CPU computes from packed weights: values, company, shapes, groups, ranks, memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.quantization.cpu import code_table
from millstream_runtime.quantization.cpu.table_linear import TableLinear
from millstream_runtime.quantization.grouped_weight import GroupedWeight, pack_halves, runs_of

SHAPES = [(64, 64), (96, 7), (129, 33), (576, 320), (1, 1), (300, 12)]
ROWS = (1, 2, 3, 5, 17, 64)
FLOAT32_NOISE = 2e-6


def grouped(
    bits: int, shape: tuple[int, int], group_size: int, *, kind: str = "zeros", act_order: bool = False
) -> tuple[GroupedWeight, Tensor]:
    """A weight `[in, out]`, and the same dequantized in float64, inputs in the model's order.

    `kind` of codes: unsigned with `zeros` per group, unsigned with one `center`, or `signed`.
    """
    num_inputs, num_outputs = shape
    generator = torch.Generator().manual_seed(num_inputs * num_outputs + bits)
    groups = torch.arange(num_inputs) // group_size
    order = torch.randperm(num_inputs, generator=generator) if act_order else None
    high = 1 << bits
    codes = torch.randint(0, high, shape, generator=generator).to(torch.uint8)
    scales = torch.rand(int(groups.max()) + 1, num_outputs, generator=generator).half() + 0.01
    zeros = torch.randint(0, high, scales.shape, generator=generator).to(torch.uint8)
    packed = pack_halves if bits == 4 else lambda one: one
    centers: Tensor | float = zeros[groups].double() if kind == "zeros" else high / 2
    weight = GroupedWeight(
        codes=packed(codes) if kind != "signed" else (codes ^ 128).view(torch.int8),
        scales=scales,
        zeros=packed(zeros) if kind == "zeros" else 0 if kind == "signed" else high // 2,
        runs=runs_of(groups),
        num_outputs=num_outputs,
        bits=bits,
        order=None if order is None else order.to(torch.int32),
    )
    dense = (codes.double() - centers) * scales.double()[groups]
    return weight, dense if order is None else dense[order.argsort()]


def by_table(weight: GroupedWeight, bias: Tensor | None = None) -> Linear:
    return TableLinear(code_table.code_table(weight), bias)


def assert_computes(linear: Linear, dense: Tensor, steps: Tensor) -> None:
    """`steps`: the range of codes times the scale, of which a zero point takes any part away."""
    for num_rows in ROWS:
        x = torch.randn(num_rows, dense.shape[0], generator=torch.Generator().manual_seed(num_rows))
        wanted = x.double() @ dense
        largest = float((x.double().square() @ steps.square()).sqrt().max())
        torch.testing.assert_close(linear(x).double(), wanted, rtol=0, atol=FLOAT32_NOISE * largest)


@pytest.mark.matrix("bits", "kind")
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size", [32, 48, 1 << 10])
@pytest.mark.parametrize(("bits", "kind"), [(4, "zeros"), (4, "center"), (8, "zeros"), (8, "center"), (8, "signed")])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_table_computes_what_the_dequantized_weight_computes(
    shape: tuple[int, int], bits: int, kind: str, group_size: int, act_order: bool
) -> None:
    """Within the rounding of float32. Groups that end within the inputs, one group, more inputs than a run has."""
    weight, dense = grouped(bits, shape, group_size, kind=kind, act_order=act_order)
    steps = weight.scales.double()[torch.arange(shape[0]) // group_size] * (1 << bits)
    assert_computes(by_table(weight), dense, steps if weight.order is None else steps[weight.order.argsort()])


LINEARS = {
    "4 bits": lambda: by_table(grouped(4, (576, 96), 64)[0]),
    "4 bits, no zero points": lambda: by_table(grouped(4, (576, 96), 64, kind="center")[0]),
    "8 bits": lambda: by_table(grouped(8, (576, 96), 64)[0]),
    "8 bits, a scale per output": lambda: by_table(grouped(8, (576, 96), 1024, kind="signed")[0]),
}


@pytest.mark.parametrize("name", LINEARS)
def test_a_row_has_the_same_bits_alone_and_in_company(name: str) -> None:
    """Beside rows of other magnitudes; where rows are many, they are multiplied by the dequantized weight."""
    linear = LINEARS[name]()
    x = torch.randn(64, 576) * torch.logspace(-6, 6, 64).unsqueeze(1)
    together = code_table.MOST_BAG_ROWS[8 if name.startswith("8") else 4]
    for start in range(0, 64, together):
        found = linear(x[start : start + together])
        assert all(torch.equal(found[row], linear(x[start + row : start + row + 1])[0]) for row in range(together))


@pytest.mark.parametrize("name", LINEARS)
def test_the_number_of_rows_changes_a_result_by_rounding_alone(name: str) -> None:
    linear = LINEARS[name]()
    x = torch.randn(64, 576)
    alone = torch.cat([linear(one.unsqueeze(0)) for one in x])
    torch.testing.assert_close(linear(x), alone, rtol=0, atol=FLOAT32_NOISE * float(alone.abs().max()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", LINEARS)
def test_a_bad_number_stays_in_its_row_and_is_seen(name: str, bad: float) -> None:
    linear = LINEARS[name]()
    for num_rows in (2, 64):
        x = torch.randn(num_rows, 576)
        good = linear(x.clone())
        x[1, 3] = bad
        found = linear(x)
        assert not found[1].isfinite().any()
        assert torch.equal(found[0], good[0])


@pytest.mark.parametrize("name", LINEARS)
def test_rows_of_zeros_and_no_rows(name: str) -> None:
    linear = LINEARS[name]()
    assert torch.equal(linear(torch.zeros(3, 576)), torch.zeros(3, 96))
    assert linear(torch.empty(0, 576)).shape == (0, 96)


@pytest.mark.parametrize("name", LINEARS)
def test_outputs_are_reordered(name: str) -> None:
    linear = LINEARS[name]()
    order = torch.randperm(96).tolist()
    x = torch.randn(3, 576)
    assert torch.equal(linear.reordered(order)(x), linear(x)[:, order])


def test_a_bias_is_added_and_taken_away() -> None:
    weight, dense = grouped(4, (64, 10), 32)
    bias, x, residual = torch.randn(10), torch.randn(2, 64), torch.ones(2, 10)
    linear = by_table(weight, bias)
    torch.testing.assert_close(linear(x), (x.double() @ dense + bias).float(), rtol=1e-4, atol=1e-4)
    linear.add_to(residual, x)
    assert torch.equal(residual, 1 + linear(x))
    assert torch.equal(linear.without_bias()(x) + bias, linear(x))
    assert linear.reordered([*range(10)][::-1]).bias is not None


@pytest.mark.parametrize("bits", [4, 8])
def test_a_table_replaces_the_weight_and_takes_its_bytes(bits: int) -> None:
    """Within 1 %: a row of the table has a scale of its own."""
    weight, _ = grouped(bits, (2048, 1024), 128)
    table = code_table.code_table(weight)
    assert weight.num_bytes < table.num_bytes < 1.01 * weight.num_bytes
