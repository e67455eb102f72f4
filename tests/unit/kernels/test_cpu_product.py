"""Products by 16-bit weights, by the kernel compiled for a CPU, against float64 over the same numbers."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.cpu import code_folder, decode
from millstream_kernels.cpu.loaded_code import LoadedCode
from millstream_kernels.cpu.product import num_panels, pack, packed_product, panels_bytes, rows_of, unpack
from millstream_kernels.cpu.task import PANEL_OUTPUTS

pytestmark = pytest.mark.skipif(
    code_folder.unsupported_machine(platform.system(), platform.machine(), code_folder.cpu_flags()) is not None,
    reason="the kernels are compiled for x86-64-v3 on Linux",
)
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def code() -> LoadedCode:
    return decode.load()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def panels_of(weight: Tensor) -> Tensor:
    panels = torch.zeros(num_panels(len(weight)), weight.shape[1], PANEL_OUTPUTS, dtype=weight.dtype)
    pack(weight, panels, 0)
    return panels


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.matrix("inputs")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 6, 41])
@pytest.mark.parametrize("outputs", [1, 17, 48, 336])
@pytest.mark.parametrize("inputs", [1, 256, 257, 576])
def test_a_product_is_that_of_float64(
    code: LoadedCode, dtype: torch.dtype, rows: int, outputs: int, inputs: int
) -> None:
    x, weight = drawn(rows, inputs), (drawn(outputs, inputs, seed=1) * 0.02).to(dtype)
    product = packed_product(code, x, panels_of(weight), outputs)
    expected, size = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    assert product.dtype == torch.float32
    assert product.shape == (rows, outputs)
    # A block of 256 products is rounded 256 times, and the sum of blocks a few times; by chance most of it cancels.
    assert bool(((product - expected).abs() <= size * 2.0**-24 * 16).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 192), (576, 1024), (2048, 272)])
def test_a_row_has_the_same_bits_in_any_company_and_with_any_threads(
    code: LoadedCode, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    x, panels = drawn(300, inputs), panels_of((drawn(outputs, inputs, seed=1) * 0.02).to(dtype))
    with threads(1):
        together = packed_product(code, x, panels, outputs)
        for count in [*range(1, 30), *range(30, 300, 9)]:
            assert torch.equal(packed_product(code, x[:count], panels, outputs), together[:count]), f"{count} rows"
            assert torch.equal(packed_product(code, x[-count:], panels, outputs), together[-count:]), f"last {count}"
    for others in (2, 3):
        with threads(others):
            assert torch.equal(packed_product(code, x, panels, outputs), together)
            assert torch.equal(packed_product(code, x[7:8], panels, outputs), together[7:8])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_16_bits_is_widened_exactly(code: LoadedCode, dtype: torch.dtype) -> None:
    """Subnormal ones and infinities included: times one, each is the float32 that torch makes of it."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = bits[~bits.isnan()]
    product = packed_product(code, torch.ones(1, 1), panels_of(numbers.unsqueeze(1)), len(numbers))
    assert torch.equal(product[0], numbers.float())


def test_a_row_of_nan_and_infinity_spoils_no_other(code: LoadedCode) -> None:
    x, weight = drawn(7, 40), drawn(50, 40, seed=1).bfloat16()
    expected = packed_product(code, x, panels_of(weight), 50)
    spoiled = x.clone()
    spoiled[3] = torch.nan
    product = packed_product(code, spoiled, panels_of(weight), 50)
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(product[others], expected[others])
    assert bool(product[3].isnan().all())


@pytest.mark.parametrize("sizes", [(50,), (3, 40, 16, 1), (16, 32, 5), (9, 7, 16)])
def test_parts_lie_one_behind_another_and_come_back(sizes: tuple[int, ...]) -> None:
    parts = [drawn(size, 20, seed=size).bfloat16() for size in sizes]
    weight = torch.cat(parts)
    panels, first = torch.zeros(num_panels(len(weight)), 20, PANEL_OUTPUTS, dtype=torch.bfloat16), 0
    for part in parts:
        pack(part, panels, first)
        first += len(part)
    assert torch.equal(unpack(panels, len(weight)), weight)
    asked = torch.tensor([0, len(weight) - 1, 2, 2])
    assert torch.equal(rows_of(panels, asked), weight[asked])
    assert panels.numel() * panels.element_size() == panels_bytes(len(weight), 20)


def test_bytes_are_two_for_each_number_and_for_the_padding_to_16_outputs() -> None:
    assert panels_bytes(3072, 576) == 3072 * 576 * 2
    assert panels_bytes(50_257, 768) == 50_272 * 768 * 2


@pytest.mark.parametrize(
    ("x", "panels", "outputs", "named"),
    [
        (torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(1, 8, 16, dtype=torch.bfloat16), 16, "x is not float32"),
        (torch.zeros(2, 9), torch.zeros(1, 8, 16, dtype=torch.bfloat16), 16, "rows of 9 numbers"),
        (torch.zeros(2, 8), torch.zeros(1, 8, 16), 16, "panels are not 16-bit"),
        (torch.zeros(2, 8), torch.zeros(1, 16, 8, dtype=torch.bfloat16).transpose(1, 2), 16, "contiguous"),
        (torch.zeros(2, 8), torch.zeros(1, 8, 16, dtype=torch.bfloat16), 17, "of 17 outputs"),
    ],
)
def test_a_wrong_argument_is_named(code: LoadedCode, x: Tensor, panels: Tensor, outputs: int, named: str) -> None:
    with pytest.raises(KernelArgumentError, match=named):
        packed_product(code, x, panels, outputs)
