"""One row by our kernel has the bits that oneDNN gives it among others, or oneDNN computes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from millstream_kernels.cpu.bfloat16 import check as bfloat16_check
from millstream_kernels.cpu.bfloat16 import one_row
from millstream_kernels.cpu.bfloat16.check import cancelling_numbers
from millstream_kernels.cpu.bfloat16.one_row import row_weight, sum_blocks_of
from millstream_kernels.cpu.bfloat16.product import OneDNN
from millstream_kernels.cpu.loaded_code import LoadedCode
from millstream_runtime.engine.cpu import compiled_code
from tests.support.bfloat16_operations import ExactOperations

needs_instructions = pytest.mark.skipif(
    bfloat16_check.load()[0] is None or compiled_code.load()[0] is None or not torch.cpu._is_avx512_bf16_supported(),
    reason="the CPU lacks AVX512_BF16",
)


@pytest.fixture
def code() -> LoadedCode:
    found, _ = compiled_code.load()
    assert found is not None
    return found


@pytest.fixture
def _orders() -> Iterator[None]:
    """Orders of sums are looked up once per process."""
    sum_blocks_of.cache_clear()
    yield
    sum_blocks_of.cache_clear()


@needs_instructions
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 1536), (1024, 128), (2048, 512), (8192, 64), (32, 64)])
def test_a_row_has_the_bits_that_it_has_among_others(
    inputs: int, outputs: int, threads: int, code: LoadedCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums that cancel, so that another order of additions would show; odd and even numbers of blocks for a thread."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    operations = OneDNN()
    x, weight = cancelling_numbers(inputs, outputs)
    packed = operations.pack(weight)
    one_row = row_weight(code, operations, packed, outputs, inputs)
    assert one_row is not None
    together = operations.product(x, packed).float()
    alone = torch.cat([one_row.product(row[None]) for row in x])
    assert torch.equal(alone, together)
    exact = x.double() @ weight.double().t()
    sizes = x.float().abs() @ weight.float().abs().t()
    assert bool(((alone.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-14 * sizes).all())


@needs_instructions
def test_numbers_that_are_not_finite_stay_so(code: LoadedCode) -> None:
    weight = torch.ones(64, 64, dtype=torch.bfloat16)
    operations = OneDNN()
    packed = operations.pack(weight)
    one_row = row_weight(code, operations, packed, 64, 64)
    assert one_row is not None
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    for number in (torch.inf, -torch.inf):
        x[0, 3] = number
        assert torch.equal(one_row.product(x), torch.full((1, 64), number))
    x[0, 3] = torch.nan
    assert bool(one_row.product(x).isnan().all())


@needs_instructions
@pytest.mark.usefixtures("_orders")
def test_another_order_of_sums_is_not_used(code: LoadedCode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_row, "SUM_BLOCKS", (8,))
    operations = OneDNN()
    assert sum_blocks_of(code, operations, 2048) is None
    packed = operations.pack(torch.randn(64, 2048).bfloat16())
    assert row_weight(code, operations, packed, 64, 2048) is None


@needs_instructions
def test_a_weight_that_lies_otherwise_is_not_read(code: LoadedCode) -> None:
    """As of another release of oneDNN: the blocks of another weight behind the same sizes."""
    operations = OneDNN()
    weight = torch.randn(128, 64).bfloat16()

    class Transposed(OneDNN):
        def product(self, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
            return super().product(x, packed).flip(1)

    assert row_weight(code, operations, operations.pack(weight), 128, 64) is not None
    assert row_weight(code, Transposed(), operations.pack(weight), 128, 64) is None


@needs_instructions
@pytest.mark.parametrize(("inputs", "outputs"), [(77, 64), (64, 45)])
def test_parts_of_blocks_are_left_to_onednn(inputs: int, outputs: int, code: LoadedCode) -> None:
    packed = OneDNN().pack(torch.randn(outputs, inputs).bfloat16())
    assert row_weight(code, OneDNN(), packed, outputs, inputs) is None


def test_a_product_that_is_not_onednns_has_no_such_rows() -> None:
    code, _ = compiled_code.load()
    if code is None:
        pytest.skip("no kernels are compiled for this machine")
    weight = torch.randn(64, 64).bfloat16()
    assert row_weight(code, ExactOperations(), ExactOperations().pack(weight), 64, 64) is None
